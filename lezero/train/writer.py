"""A model and its tokenizer together, from wherever they lie: what `lz generate` uses.

Plain generation, one prompt at a time; a serving engine is another thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from lezero.core.errors import ConfigError
from lezero.core.paths import expand_home
from lezero.hub.opened import open_model
from lezero.models import Transformer, generate_stream, gguf_end_tokens, gguf_tokenizer, stop_tokens

TOKENS = 128
"""New ones where nobody says how many."""


class Coder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Any) -> str: ...


class Writer:
    """Continues prompts. `stop` are tokens that end a text, `start` those a prompt begins with."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Coder,
        stop: tuple[int, ...],
        start: tuple[int, ...] = (),
    ) -> None:
        self.model, self.tokenizer, self.stop = model.eval(), tokenizer, stop
        self._start = list(start)

    def write(self, prompt: str, tokens: int | None = None, **sampling: Any) -> Iterator[str]:
        """The prompt, then pieces of text as they come; never half a character.

        tokens: most new ones; without it 128, or what the model's context has room for.
        """
        if tokens is not None and tokens < 1:
            raise ConfigError(f"tokens: got {tokens}, allowed is 1 or more")
        if not _is_text(prompt):
            raise ConfigError("prompt: holds bytes that are no UTF-8; give it as text")
        start = self.tokenizer.encode(prompt)
        if start[: len(self._start)] != self._start:
            start = self._start + start
        start = start or [*self.stop[:1]]
        if not start:
            raise ConfigError("prompt: it is empty and the tokenizer has no token to start from")
        if tokens is None:
            tokens = max(1, min(TOKENS, self.model.config.longest - len(start)))
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
    place = expand_home(place)
    model, folder = open_model(place, torch.float32)
    if folder is None:
        found = gguf_tokenizer(place)  # it writes what a prompt begins with by itself
        return Writer(model, found, _ends_of(found, place))
    from lezero.data import load_tokenizer

    tokenizer = load_tokenizer(folder)
    if folder != Path(place):  # of a run, which was trained without start tokens
        return Writer(model, tokenizer, (tokenizer.eos,))
    ends = dict.fromkeys((tokenizer.eos, *stop_tokens(folder)))
    return Writer(model, tokenizer, tuple(ends), tokenizer.start)


def _is_text(prompt: str) -> bool:
    """Bytes of a command line that are no UTF-8 arrive as half characters."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ends_of(tokenizer: Any, place: str) -> tuple[int, ...]:
    """The tokenizer's own end of text first: an empty prompt starts with it."""
    end = getattr(tokenizer, "eos_token_id", None)
    first = [end] if isinstance(end, int) else []
    return (*first, *sorted(gguf_end_tokens(place) - {*first}))
