"""The vocabulary inside a GGUF file: its tokenizer, and the tokens that end a text."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from lezero.core.errors import FileError, need_extra
from lezero.core.paths import expand_home, open_regular
from lezero.models.gguf_header import read_gguf_header
from lezero.models.gguf_rules import NOT_WRITTEN, follow_llama_cpp
from lezero.ops.build import kept

_FORM = "3"
"""Of what is kept of a vocabulary; another one is made again."""
_ENDS = tuple(f"{kind}_token_id" for kind in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"))
"""The end of a text, of a turn, of a message that waits for a tool, and of a gap's filling, where
another file or repository would begin."""
_NAMED_ENDS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "</s>"}
_NAMED_ENDS |= {"<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<end_of_utterance>"}
_NAMED_ENDS |= {"<EOT>", "_<EOT>", "[EOT]", "<eos>", "[EOS]", "<|fim_pad|>", "<fim-pad>", "<PAD>"}
_NAMED_ENDS |= {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"}
_NAMED_ENDS |= {"<|file_sep|>"}
"""What llama.cpp takes for ends too, of what models of these architectures have."""


def gguf_tokenizer(path: str | os.PathLike[str], save_to: str | None = None) -> Any:
    """The tokenizer inside a GGUF file, as a transformers tokenizer (extra `hf`).

    transformers takes seconds to read it, so what it makes of a vocabulary is kept in the cache
    folder. Do not call its `save_pretrained`: for byte-level vocabularies, what transformers then
    loads again splits text wrongly. Pass `save_to` instead, which writes a folder that loads right.

    Raises `FileError` where the file holds none that can be read.
    """
    file = Path(expand_home(path)).absolute()
    start = read_gguf_header(file).data_start
    gguf_package()
    try:
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise need_extra("hf", "transformers", "reading a GGUF tokenizer") from None
    digest = _digest_of_beginning(file, start)
    versions = [metadata.version(name) for name in ("transformers", "tokenizers", "gguf")]
    made_from = " ".join([digest, _FORM, *versions])
    held = json.loads(kept("gguf-tokenizer", made_from, functools.partial(_converted, file)))
    if save_to is not None:
        _save_tokenizer(held, Path(expand_home(save_to)))
    settings = {key: x for key, x in held["settings"].items() if key != "tokenizer_class"}
    backend = Tokenizer.from_str(held["tokenizer"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def _digest_of_beginning(file: Path, size: int) -> str:
    digest = hashlib.sha256()
    with open_regular(file) as opened:
        while size > 0 and (some := opened.read(min(size, 1 << 20))):
            digest.update(some)
            size -= len(some)
    return digest.hexdigest()


def _converted(file: Path) -> bytes:
    """What transformers makes of a file's vocabulary, put right, as JSON. It takes seconds."""
    from transformers import AutoTokenizer

    try:
        # By itself, as files beside it are not in what names the result.
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "alone.gguf").symlink_to(file)
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="alone.gguf")
    except Exception as error:  # of any kind, where keys are missing
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise FileError(
            f"{file}: its tokenizer cannot be read ({first}); take the model's Hugging Face "
            "folder, or give lz.LLM a coder"
        ) from None
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for kind in ("bos_token", "eos_token", "unk_token", "pad_token"):
        if getattr(tokenizer, kind, None) is not None:
            settings[kind] = str(getattr(tokenizer, kind))
    if getattr(tokenizer, "chat_template", None):
        settings["chat_template"] = tokenizer.chat_template
    backend = follow_llama_cpp(tokenizer.backend_tokenizer, file)
    held = {"tokenizer": backend.to_str(), "settings": settings}
    return json.dumps(held).encode()


def _save_tokenizer(held: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(held["tokenizer"], encoding="utf-8")
    text = json.dumps(held["settings"], indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def gguf_end_tokens(path: str | os.PathLike[str]) -> frozenset[int]:
    """The tokens that end an answer by a GGUF file's metadata: of the text, the turn, the message.

    What no token of the vocabulary has, as the 2^32 - 1 that llama.cpp writes for none, is left
    out. The tokens with the usual names of an end are ends too, as in llama.cpp. Raises `FileError`
    for a file that cannot be read.
    """
    keys = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
    metadata = read_gguf_header(path, whole=keys).metadata
    tokens, types = (x if isinstance(x, list) else [] for x in map(metadata.get, keys))
    ids = {key: metadata.get(f"tokenizer.ggml.{key}") for key in _ENDS}
    known = {key: x for key, x in ids.items() if type(x) is int and 0 <= x < len(tokens)}
    pairs = enumerate(zip(tokens, types, strict=False))
    named = [i for i, (name, kind) in pairs if name in _NAMED_ENDS and kind in NOT_WRITTEN]
    return frozenset([*known.values(), *named])


def gguf_package() -> Any:
    """The `gguf` package, of the extra `hf`."""
    try:
        import gguf
    except ImportError:
        raise need_extra("hf", "gguf", "reading a GGUF file") from None
    return gguf
