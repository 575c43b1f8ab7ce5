"""What a captured graph reads, and what repeats it; the timing of such steps.

Shapes: B sequences.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lezero.core import device
from lezero.serve.flight import Flight
from lezero.serve.program import Fed

_ROUNDS, _REPLAYS = 5, 10


class Step:
    """What a graph reads, always at the same addresses, and what repeats it.

    All of it is one tensor of whole numbers, so that one copy brings it. It comes from two places
    of the host in turn, and the best tokens go to two: a step is launched while one flies.
    """

    replay: Callable[[], None]
    logits_BV: Tensor
    kept: tuple[Tensor, ...] = ()
    """What the graph has the addresses of and others may replace."""
    ran = False
    """Whether it was launched once, graph or not."""

    def __init__(self, sequences: int, blocks: int, place: torch.device) -> None:
        self._shape, pinned = (sequences, 3 + blocks), place.type == "cuda"
        inputs = torch.zeros(self._shape, dtype=torch.int64, device=place)
        self._inputs = inputs
        self.token_B, self.row_B, self.position_B = (inputs[:, i] for i in range(3))
        self.table_BW = inputs[:, 3:]
        size = sequences * (3 + blocks)
        self._hosts = [
            torch.zeros(size, dtype=torch.int64, pin_memory=pinned, device="cpu") for _ in range(2)
        ]
        self._found = [
            torch.zeros(sequences, dtype=torch.int64, pin_memory=pinned, device="cpu")
            for _ in range(2)
        ]
        self._passed: list[Callable[[], None]] = [_nothing, _nothing]
        self._turn = 0

    def fill(self, fed: Sequence[Fed], nobody: int, rows: Sequence[int] = ()) -> None:
        """Takes the sequences of a step; the rows after them are of `nobody`. rows: of the step
        before, whose best token a sequence takes in place of its own."""
        self._turn = 1 - self._turn
        self._passed[self._turn]()  # nothing reads what is written now
        B, width = self._shape
        W, filled = width - 3, [0, -1, 0, *[nobody] * (width - 3)]
        numbers = []
        for i, one in enumerate(fed):
            blocks = one.blocks[:W]
            row = rows[i] if rows else -1
            numbers += [one.tokens[0], row, one.position, *blocks, *filled[3 + len(blocks) :]]
        numbers += filled * (B - len(fed))
        host = self._hosts[self._turn]
        host.copy_(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        self._inputs.copy_(host.view(self._shape), non_blocking=True)
        self._passed[self._turn] = device.mark(self._inputs.device)

    def wait(self) -> None:
        """Until all that was launched before has ended."""
        device.mark(self._inputs.device)()

    def flight(self, count: int, best_B: Tensor) -> Flight:
        """What was just replayed, on its way."""
        turn, found = self._turn, self._found[self._turn]
        found.copy_(best_B[: len(found)], non_blocking=True)
        self._passed[turn] = device.mark(best_B.device)
        return _Flight(found, count, self._passed[turn])


class _Flight(Flight):
    def __init__(self, found: Tensor, count: int, passed: Callable[[], None]) -> None:
        self._found, self._count, self._passed = found, count, passed

    def tokens(self) -> list[int]:
        self._passed()
        return self._found[: self._count].tolist()


def seconds_of(steps: Sequence[Step], fed: Sequence[Fed], nobody: int) -> list[float]:
    """Of one replay of each step, replayed in turns: the best of some."""
    took = [math.inf] * len(steps)
    for _ in range(_ROUNDS):
        for i, step in enumerate(steps):
            step.fill(fed, nobody)
            step.wait()
            began = time.perf_counter()
            for _ in range(_REPLAYS):
                step.replay()
            step.wait()
            took[i] = min(took[i], (time.perf_counter() - began) / _REPLAYS)
    return took


def _nothing() -> None:
    pass
