"""A model and its tokenizer together, from wherever they lie: what `lz generate` uses.

Plain generation, one prompt at a time; a serving engine is another thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lezero.core.errors import ConfigError
from lezero.core.paths import expand_home
from lezero.data.detokenizer import Detokenizer
from lezero.hub.opened import open_model
from lezero.models import Transformer, generate_stream
from lezero.serve.coder import Coder, open_coder

TOKENS = 128
"""New ones where nobody says how many."""


class Writer:
    """Continues prompts, which it reads and ends as the engine does: by the same `Coder`."""

    def __init__(self, model: Transformer, coder: Coder) -> None:
        self.model, self.coder = model.eval(), coder

    def write(self, prompt: str, tokens: int | None = None, **sampling: Any) -> Iterator[str]:
        """The prompt, then pieces of text as they come; never half a character.

        tokens: most new ones; without it 128, or what the model's context has room for.
        """
        if tokens is not None and tokens < 1:
            raise ConfigError(f"tokens: got {tokens}, allowed is 1 or more")
        if not _is_text(prompt):
            raise ConfigError("prompt: holds bytes that are no UTF-8; give it as text")
        start = self.coder.encode(prompt)
        if not start and (first := self.coder.first_token) is not None:
            start = [first]
        if not start:
            raise ConfigError("prompt: it is empty and the tokenizer has no token to start from")
        if tokens is None:
            tokens = max(1, min(TOKENS, self.model.config.longest - len(start)))
        ends = self.coder.end_tokens
        stream = generate_stream(self.model, start, tokens, stop=tuple(ends), **sampling)
        text = Detokenizer(self.coder.decode, start)
        yield prompt
        for token in stream:
            if token in ends:
                break
            yield text.add(token)
        yield text.finish()


def open_writer(place: str) -> Writer:
    """Opens a run's newest good checkpoint, a Hugging Face folder (also a quantized one) or a GGUF
    file.

    Raises `FileError` when `place` is none of them, or is damaged.
    """
    place = expand_home(place)
    model, folder = open_model(place, torch.float32)
    return Writer(model, open_coder(place, folder))


def _is_text(prompt: str) -> bool:
    """Bytes of a command line that are no UTF-8 arrive as half characters."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return False
    return True
