"""The rules by which llama.cpp reads a vocabulary, where transformers reads it otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lezero.core.errors import FileError
from lezero.models.gguf_header import read_gguf_header
from lezero.models.gguf_splits import split_of

CONTROL = 3
NOT_WRITTEN = (CONTROL, 4)
"""Types of tokens that no text is made of: control tokens, and those that a user added, as which
early files have ends too."""
_LISTS = "tokens", "token_type"
_NAMED = ("bos", "eos", "unknown", "padding")
_BEGINS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"}
_BEGINS |= {"lfm2", "jina-v5-nano", "tekken"}
"""Byte-level splits (`tokenizer.ggml.pre`) whose texts begin with a token where no key says so."""
_WHOLE = _BEGINS | {"minicpm5", "youtu", "granite-embed-multi-97m"}
"""Those that take a word that is a token whole, whatever its merges are."""
_HOW = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def follow_llama_cpp(made: Any, file: Path) -> Any:
    """`made`, a tokenizer of `tokenizers` that transformers read from `file`, put right.

    Special tokens keep the ids of the file: transformers spells those of a byte-level vocabulary in
    bytes, and adds them behind it. Words are cut as the file names it, which transformers knows of
    some names only. Texts begin with the first token where llama.cpp adds it, and in
    SentencePiece vocabularies with a space behind special tokens too. Raises `FileError` where a
    special token cannot keep its id, and for a cut that is not known.
    """
    keys = [f"tokenizer.ggml.{name}" for name in _LISTS]
    metadata = read_gguf_header(file, whole=keys).metadata
    said = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind, state = said.get("model"), json.loads(made.to_str())
    pieces = kind == "llama" and (state["pre_tokenizer"] or {}).get("type") == "Metaspace"
    if kind != "gpt2" and not pieces:
        return made
    found = _with_ids(state, said, file)
    if pieces:
        _put_spaces(found, said.get("add_space_prefix") is not False)
    else:
        found.pre_tokenizer = split_of(said.get("pre"), file)
        found.model.ignore_merges = said.get("pre") in _WHOLE
    _put_ends(found, said, begins=pieces or said.get("pre") in _BEGINS)
    return found


def _with_ids(state: dict[str, Any], said: dict[str, Any], file: Path) -> Any:
    from tokenizers import Tokenizer

    tokens, types = (x if isinstance(x, list) else [] for x in map(said.get, _LISTS))
    types = types[: len(tokens)]
    special = {i: kind == CONTROL for i, kind in enumerate(types) if kind in NOT_WRITTEN}
    special |= {i: True for i in map(_id(said).get, _NAMED) if i is not None}
    spelled = {i: text for text, i in state["model"]["vocab"].items() if i not in special}
    state["model"]["vocab"] = {spelled.get(i, text): i for i, text in enumerate(tokens)}
    state["added_tokens"] = [
        {"id": i, "content": tokens[i], **_HOW, "special": special[i]}
        for i in sorted(special)
        if tokens[i]
    ]
    found = Tokenizer.from_str(json.dumps(state))
    lost = [one for one in state["added_tokens"] if found.token_to_id(one["content"]) != one["id"]]
    if lost:
        raise FileError(
            f"{file}: its tokenizer cannot be read (token {lost[0]['id']}, "
            f"{lost[0]['content']!r}, is there twice); take the model's Hugging Face folder, or "
            "give lz.LLM a coder"
        )
    return found


def _id(said: dict[str, Any]) -> dict[str, int]:
    """The ids that the file gives its named tokens, by name: of those that it has."""
    ids = {name: said.get(f"{name}_token_id") for name in _NAMED}
    tokens = said.get("tokens")
    count = len(tokens) if isinstance(tokens, list) else 0
    return {name: i for name, i in ids.items() if type(i) is int and 0 <= i < count}


def _put_spaces(found: Any, prefix: bool) -> None:
    """A space before each stretch of text, or none: not before the first one alone."""
    from tokenizers import decoders, normalizers

    first = [normalizers.Prepend("▁")] if prefix else []
    found.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    found.pre_tokenizer = None
    last = [decoders.Strip(content=" ", left=1)] if prefix else []
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    found.decoder = decoders.Sequence(parts)


def _put_ends(found: Any, said: dict[str, Any], begins: bool) -> None:
    """The tokens before and after a text. begins: where no key says whether one is before it."""
    from tokenizers import processors

    ids, adds = _id(said), {"bos": said.get("add_bos_token", begins)}
    adds["eos"] = said.get("add_eos_token", False)
    name = {kind: found.id_to_token(i) for kind, i in ids.items() if adds.get(kind) is True}
    bos, eos = ([name[kind]] if kind in name else [] for kind in ("bos", "eos"))
    found.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *(f"{x}:1" for x in bos), "$B:1", *(f"{x}:1" for x in eos)],
        special_tokens=[(text, ids[kind]) for kind, text in name.items()],
    )
