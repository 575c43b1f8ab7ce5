"""How byte-level vocabularies of GGUF files cut a text into words, by the name that a file says.

Merges never cross words, so that another cut gives a model pieces that it was not taught. Each name
stands for one or more expressions, of which each cuts on what those before it left: llama.cpp's
(`src/llama-vocab.cpp`), for most names that it knows.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lezero.core.errors import FileError

_LOG = logging.getLogger(__name__)

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _words(digits: str, signs: str = _SIGNS, endings: str = f"{_ENDINGS}|") -> str:
    """As Llama 3 and Qwen 2 cut, which differ in the digits of a word."""
    return rf"{endings}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{signs}|{_LINES}"


def _cases(digits: str, endings: str = "") -> str:
    """As Tekken and GPT-4o cut: words end where capitals begin."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{first}{upper}*{lower}+{endings}|{first}{upper}+{lower}*{endings}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
    )


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED = (  # letters with cases, as Unicode had them when the model was made
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}\x{10CD}\x{10D0}-\x{10FF}\x{1C80}-\x{1C88}"
    r"\x{2D00}-\x{2D2D}\x{A790}-\x{A7CA}\x{A7D0}-\x{A7D9}\x{A7F5}-\x{A7FA}\x{AB30}-\x{AB68}"
    r"\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF1E}]]"
)
_CJK = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_MARKS = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
)
_THREE_DIGITS = r"\p{N}{1,3}"
_UNNAMED = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_LLAMA3, _QWEN2 = (_words(_THREE_DIGITS),), (_words(r"\p{N}"),)
_MARKED = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"  # marks go with letters, not with signs
_QWEN35 = _words(r"\p{N}", _MARKED).replace(r"?\p{L}+", r"?[\p{L}\p{M}]+")
_GPT4O, _ONE_DIGIT = (_cases(_THREE_DIGITS, f"{_ENDINGS}?"),), (r"\p{N}", _GPT2)

_FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3),
    ("dbrx smaug-bpe glm4 chatglm-bpe", _LLAMA3),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN2),
    ("qwen35", (_QWEN35,)),
    ("tekken", (_cases(r"\p{N}"),)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo trillion exaone4 granite-docling",
        (_GPT2,),
    ),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", _ONE_DIGIT),
    ("deepseek-llm", (r"[\r\n]", rf"\s?{_CASED}+", _MARKS, r"\s+$", _CJK, r"\p{N}+")),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        (_THREE_DIGITS, r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+", _DEEPSEEK_V3),
    ),
    ("seed-coder", (_words(r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    ("ufakzeka", (_words(r"\p{N}", endings=""),)),
    ("minicpm5", (_THREE_DIGITS, _words(r"\p{N}+"))),
    ("viking", (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
    ("default", _UNNAMED),
)
_SPLITS = {name: split for names, split in _FAMILIES for name in names.split()}


def split_of(name: Any, file: Path) -> Any:
    """The pre-tokenizer that `tokenizer.ggml.pre` names. Raises `FileError` for one not known."""
    from tokenizers import Regex, pre_tokenizers

    if name is None:
        _LOG.warning(
            "%s does not say how it cuts a text into words (tokenizer.ggml.pre); it is cut as "
            "llama.cpp does then, which may not be as the model was taught: take a newer file, or "
            "the model's Hugging Face folder",
            file,
        )
    found = _SPLITS.get("default" if name is None else name)
    if found is None:
        raise FileError(
            f"{file}: its tokenizer cuts a text in a way that is not known (tokenizer.ggml.pre is "
            f"{name!r}); take the model's Hugging Face folder, or give lz.LLM a coder"
        )
    cuts = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in found]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, byte_level])
