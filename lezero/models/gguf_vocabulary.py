"""The vocabulary inside a GGUF file: its tokenizer, and the tokens that end a text."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lezero.core.errors import FileError, need_extra
from lezero.core.paths import expand_home
from lezero.models.gguf_header import read_gguf_header

# The end of a text, of a turn, and of a message that waits for a tool.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_tokenizer(path: str | os.PathLike[str], save_to: str | None = None) -> Any:
    """The tokenizer inside a GGUF file, as a transformers tokenizer (extra `hf`).

    Do not call its `save_pretrained`: for byte-level vocabularies, what transformers then loads
    again splits text wrongly. Pass `save_to` instead, which writes a folder that loads right.

    Raises `FileError` where the file holds none that can be read.
    """
    file = Path(expand_home(path)).absolute()
    read_gguf_header(file)
    gguf_package()
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise need_extra("hf", "transformers", "reading a GGUF tokenizer") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    except Exception as error:  # of any kind, where keys are missing
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise FileError(
            f"{file}: its tokenizer cannot be read ({first}); take the model's Hugging Face "
            "folder, or give lz.LLM a coder"
        ) from None
    if save_to is not None:
        _save_tokenizer(tokenizer, Path(expand_home(save_to)))
    return tokenizer


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for kind in ("bos_token", "eos_token", "unk_token", "pad_token"):
        if getattr(tokenizer, kind, None) is not None:
            settings[kind] = str(getattr(tokenizer, kind))
    if getattr(tokenizer, "chat_template", None):
        settings["chat_template"] = tokenizer.chat_template
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def gguf_end_tokens(path: str | os.PathLike[str]) -> frozenset[int]:
    """The tokens that end an answer by a GGUF file's metadata: of the text, the turn, the message.

    What no token of the vocabulary has, as the 2^32 - 1 that llama.cpp writes for none, is left
    out. Raises `FileError` for a file that cannot be read.
    """
    metadata = read_gguf_header(path).metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    size = tokens if isinstance(tokens, int) else len(tokens or ())  # of a long list the length
    every = [metadata.get(f"tokenizer.ggml.{key}") for key in _ENDS]
    return frozenset(x for x in every if type(x) is int and 0 <= x < size)


def gguf_package() -> Any:
    """The `gguf` package, of the extra `hf`."""
    try:
        import gguf
    except ImportError:
        raise need_extra("hf", "gguf", "reading a GGUF file") from None
    return gguf
