"""A model and its tokenizer together, from wherever they lie: what `lz generate` uses.

Plain generation, one prompt at a time; a serving engine is another thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from lezero import checkpoint
from lezero.compress.quantize import is_quantized_folder, load_quantized
from lezero.core.errors import ConfigError, FileError
from lezero.models import (
    Transformer,
    TransformerConfig,
    generate_stream,
    gguf_tokenizer,
    load_gguf,
    load_hf,
    stop_tokens,
)

_TOKENS = 128


class Coder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Any) -> str: ...


class Writer:
    """Continues prompts. `stop` are tokens that end a text."""

    def __init__(self, model: Transformer, tokenizer: Coder, stop: tuple[int, ...]) -> None:
        self.model, self.tokenizer, self.stop = model.eval(), tokenizer, stop

    def write(self, prompt: str, tokens: int | None = None, **sampling: Any) -> Iterator[str]:
        """The prompt, then pieces of text as they come; never half a character.

        tokens: most new ones; without it 128, or what the model's context has room for.
        """
        if tokens is not None and tokens < 1:
            raise ConfigError(f"tokens: got {tokens}, allowed is 1 or more")
        start = self.tokenizer.encode(prompt) or [*self.stop[:1]]
        if not start:
            raise ConfigError("prompt: it is empty and the tokenizer has no token to start from")
        if tokens is None:
            tokens = max(1, min(_TOKENS, self.model.config.longest - len(start)))
        new: list[int] = []
        shown = ""
        stream = generate_stream(self.model, start, tokens, stop=self.stop, **sampling)
        yield prompt
        for token in stream:
            if token in self.stop:
                break
            new.append(token)
            text = self.tokenizer.decode(new)
            if not text.endswith("\ufffd") and text.startswith(shown):
                yield text[len(shown) :]
                shown = text


def open_writer(place: str) -> Writer:
    """Opens a run's newest good checkpoint, a Hugging Face folder (also a quantized one) or a GGUF
    file.

    Raises `FileError` when `place` is none of them, or is damaged.
    """
    model, folder = open_model(place, torch.float32)
    if folder is None:
        found = gguf_tokenizer(place)
        return Writer(model, found, _end_of(found))
    from lezero.data import load_tokenizer

    tokenizer = load_tokenizer(folder)
    stop = stop_tokens(folder) if folder == Path(place) else (tokenizer.eos,)
    return Writer(model, tokenizer, stop)


def open_model(place: str, dtype: torch.dtype | None = None) -> tuple[Transformer, Path | None]:
    """The model and the folder that holds its tokenizer; None: the tokenizer is in a GGUF file.

    `dtype` casts the weights of Hugging Face folders and GGUF files (fp32 there where it is not
    given). Raises `FileError` when `place` is no model, or is damaged.
    """
    path = Path(place)
    if path.is_file() and path.suffix == ".gguf":
        return load_gguf(path, dtype), None
    if (path / "config.json").is_file():
        if is_quantized_folder(path):
            model = load_quantized(path)
            return model if dtype is None else model.to(dtype), path
        return load_hf(path, dtype), path
    if not path.exists():
        raise FileError(f"{path}: no such file or folder")
    return _from_run(path)


def _from_run(path: Path) -> tuple[Transformer, Path]:
    loaded = checkpoint.load(path)
    shape = loaded.documents.get("model")
    run = path if (path / "tokenizer").is_dir() else path.parent
    run = run if (run / "tokenizer").is_dir() else run.parent
    if shape is None or not (run / "tokenizer").is_dir():
        raise FileError(
            f"{path}: neither a run of the trainer, nor a Hugging Face folder, nor a .gguf file"
        )
    with torch.device("meta"):
        model = Transformer(TransformerConfig.parse(shape, f"{loaded.path}: model"))
    model.load_state_dict(loaded.section("model"), assign=True)
    return model, run / "tokenizer"


def _end_of(tokenizer: Any) -> tuple[int, ...]:
    end = getattr(tokenizer, "eos_token_id", None)
    return (end,) if isinstance(end, int) else ()
