"""Evaluation mode does not run what a module does when its mode changes."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.nn.modes import evaluating, uncompiled
from lezero.train.engine import Engine


class Merging(nn.Module):
    """An adapter that merges its weights in evaluation, as loralib's do."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.up = nn.Linear(2, 2), nn.Parameter(torch.ones(2, 2))
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.merged is mode:
            with torch.no_grad():
                self.line.weight += -self.up if mode else self.up
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) + (0 if self.merged else x @ self.up.T)


def quantized(model: nn.Module, x: torch.Tensor) -> None:
    def worse(_: nn.Module) -> float:
        raise ArithmeticError("no quality")

    with pytest.raises(ArithmeticError):
        lz.quantize_(model, lz.Int8Weight(), data=[x], objective="size", budget=1.0, metric=worse)


def evaluated(model: nn.Module, x: torch.Tensor) -> None:
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda m, x: m(x).square().mean(),
        precision="fp32", compile="off",
    )  # fmt: skip
    assert engine.evaluate([x]) is not None


def checked(model: nn.Module, x: torch.Tensor) -> None:
    lz.from_pytorch(model, example_inputs=x)


@pytest.mark.parametrize("through", [quantized, evaluated, checked])
def test_an_adapter_that_merges_is_as_it_was(through) -> None:
    model, x = nn.Sequential(Merging(), nn.Linear(2, 1)), torch.ones(3, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    through(model, x)
    assert not model[0].merged
    assert all(part.training for part in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_each_module_keeps_its_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model[1].eval()
    with evaluating(model):
        assert not any(part.training for part in model.modules())
    assert [part.training for part in model] == [True, False, True]


def test_overlapping_blocks_give_back_how_functions_were_compiled() -> None:
    """The switch is one for the process: the block that ends last is that which puts it back."""
    from torch._dynamo import eval_frame

    def now() -> str:
        return eval_frame._stance.stance

    inside, leave, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with uncompiled():
            inside.set()
            leave.wait(10)
            seen.append(now())

    thread = threading.Thread(target=other)
    with uncompiled():
        thread.start()
        assert inside.wait(10)
    assert now() == "force_eager"
    leave.set()
    thread.join()
    assert seen == ["force_eager"]
    assert now() == "default"
