"""Buffers are put back however a forward pass changed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lezero as lz
from lezero.nn.buffers import BufferSnapshot


class Observed(nn.Module):
    """Changes its buffers in each of the ways that modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("resized", torch.zeros(0))  # as the observers of torch.ao
        self.register_buffer("made", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.written += 1
            self.replaced = 0.9 * self.replaced + x.mean()
            self.resized.resize_(2).copy_(x[0])
            self.made = x.sum()
        return self.line(x)


def state(model: nn.Module) -> list[tuple[int, torch.Tensor | None]]:
    return [(id(b), None if b is None else b.clone()) for b in model._buffers.values()]


def snapshot(model: Observed, x: torch.Tensor) -> None:
    kept = BufferSnapshot(model)
    model(x)
    kept.restore()


def check(model: Observed, x: torch.Tensor) -> None:
    lz.from_pytorch(model, example_inputs=x)


@pytest.mark.parametrize("leaves_nothing", [snapshot, check])
def test_a_pass_leaves_buffers_as_they_were(leaves_nothing):
    model, x = Observed(), torch.ones(3, 2)
    model(x)
    model.made, model.resized = None, torch.zeros(0)
    before = state(model)
    leaves_nothing(model, x)
    for (name, now), (then, value) in zip(state(model), before, strict=True):
        assert name == then
        assert now is value is None or torch.equal(now, value)


def test_what_torch_does_not_let_write_is_no_trouble() -> None:
    model = nn.Module()
    model.register_buffer("expanded", torch.ones(1).expand(4))
    with torch.inference_mode():
        model.register_buffer("mean", torch.ones(3))
    before = dict(model._buffers)
    kept = BufferSnapshot(model)
    model.mean = torch.zeros(3)
    kept.restore()
    assert all(model._buffers[name] is before[name] for name in before)


class Grows(nn.Module):
    """A table and a scale with their length beside them, a list, and a layer that the first call
    makes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0))
        self.register_buffer("scale", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))
        self.length, self.rows, self.head = 0, list[torch.Tensor](), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.head is None:
            self.head, self.width = nn.Identity(), 1
        self.rows.append(x)
        if len(x) > self.length:
            self.length, self.table = len(x), torch.arange(len(x))
            self.scale = torch.full((), 0.5)
        return self.head(self.rows[-1] + self.table[: len(x)] * self.scale * self.width)


@pytest.mark.parametrize("leaves_nothing", [snapshot, check])
def test_a_table_stays_with_what_its_module_notes_of_it(leaves_nothing) -> None:
    model, x = Grows(), torch.zeros(3)
    wanted = Grows()(x)
    leaves_nothing(model, x)
    assert (model.length, len(model.table), float(model.calls)) == (3, 3, 0)
    assert torch.equal(model(x), wanted)
    kept = BufferSnapshot(model)
    model.table = torch.ones(3)
    kept.restore()
    assert torch.equal(model(x), wanted)


class Noted(nn.Module):
    """A table beside a note of the length that it was made for, made of `note`."""

    def __init__(self, note: Callable[[int], Any]) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(()), persistent=False)
        self.note, self.noted = note, note(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.noted, torch.Tensor) and self.note(0) is self.noted:
            self.noted += 1
        else:
            self.noted = self.note(len(x))
        self.table = torch.full((), float(len(x)))
        return x + self.table


ONE = torch.zeros(())
NOTES: dict[str, Callable[[int], Any]] = {
    "number": lambda n: n,
    "size": lambda n: torch.zeros(n, 2).shape,
    "list": lambda n: [n, 7],
    "lists": lambda n: [[1, 2], (n, 2)],
    "numpy": np.int64,
    "numpy becomes a list": lambda n: np.int64(3) if n == 2 else [n],
    "a tuple becomes numpy": lambda n: (n, 3) if n == 2 else np.int64(n),
    "numpy in a list": lambda n: [np.int64(n) if n == 2 else (n, 3)],
    "tensor": torch.tensor,
    "of another type": lambda n: torch.tensor(n, dtype=torch.int32 if n == 2 else torch.int64),
    "written": lambda n: ONE,
}


@pytest.mark.parametrize("kind", NOTES)
def test_notes_of_any_kind_are_seen(kind: str) -> None:
    model = Noted(NOTES[kind])
    for length, stays in ((3, True), (3, kind == "written")):
        model.table = torch.zeros(())
        kept = BufferSnapshot(model)
        model(torch.zeros(length))
        kept.restore()
        assert float(model.table) == (3 if stays else 0)
