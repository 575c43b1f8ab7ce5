"""A program on the CPU whose steps can be launched ahead, as on an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lezero.serve.flight import Flight
from lezero.serve.plain import PlainProgram
from lezero.serve.program import Fed
from tests.serve.models import small


class Flown(Flight):
    def __init__(self, program: Flying, logits: Tensor) -> None:
        self._program = program
        top = logits.argmax(-1)
        finite = logits.amax(-1).isfinite()
        self.fed = top.where(finite, 0).tolist()
        self._found = top.where(finite, -1).tolist()

    def tokens(self) -> list[int]:
        flying = self._program.unread
        assert flying[0] is self, "read out of order"
        flying.pop(0)
        self._program.most_unread = max(self._program.most_unread, len(flying) + 1)
        if self._program.fails_at == (read := self._program.read):
            self._program.fails_at = -1
            raise RuntimeError("a kernel failed")
        self._program.read = read + 1
        return self._found


class Flying(PlainProgram):
    """launched: sequences of each launch, and whether it was ahead. fails_at: the flight, counted
    from 0, whose tokens cannot be read."""

    flies = True

    def __init__(self) -> None:
        super().__init__(small().double())
        self.launched: list[tuple[int, bool]] = []
        self.unread: list[Flown] = []
        self.most_unread = self.read = 0
        self.fails_at = -1

    def run(self, fed: Sequence[Fed]) -> Tensor:
        self.unread.clear()  # what is run now ends all that flew
        return super().run(fed)

    def launch(
        self, fed: Sequence[Fed], after: Flight | None = None, rows: Sequence[int] = ()
    ) -> Flight | None:
        assert all(len(one.tokens) == 1 and list(one.rows) == [0] for one in fed)
        if after is None:
            self.unread.clear()
        else:
            assert isinstance(after, Flown)
            assert self.unread == [after], "only the last launch can be followed"
            assert len(rows) == len(fed)
            fed = [replace(x, tokens=[after.fed[row]]) for x, row in zip(fed, rows, strict=True)]
        self.launched.append((len(fed), after is not None))
        flown = Flown(self, super().run(fed))
        self.unread.append(flown)
        return flown


class Walking(Flying):
    """The same model, every step of which is waited for."""

    flies = False


def poisoned(program: PlainProgram, token: int) -> None:
    """Lets the model give no numbers after a token."""
    with torch.no_grad():
        program._model.embed_tokens.weight[token] = torch.nan
