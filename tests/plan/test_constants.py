"""Numbers that constructors read: rates of stochastic depth, and draws within bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lezero.core.errors import ConfigError
from lezero.plan import StepSpec
from lezero.plan.constants import Constants
from lezero.plan.faking import _undrawn, faking
from lezero.plan.trace import Trace, trace_step

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item of each": lambda x: [y.item() for y in x],
    "tolist": lambda x: x.tolist(),
    "split": lambda x: [y.tolist() for y in x.split([2, 4])],
    "chunk and flip": lambda x: [y.flip(0).tolist() for y in torch.chunk(x, 2)],
    "float": lambda x: [float(x[2]), int(x[-1] * 100)],
    "bool": lambda x: [bool(y > 0.1) for y in x],
    "numpy": lambda x: x.numpy().tolist(),
    "arithmetic": lambda x: (1 - x**2 / torch.arange(1, 7)).tolist(),
    "sum": lambda x: x.cumsum(0).max().item(),
    "tensor": lambda x: torch.tensor([3, 4, 5]).cumsum(0).tolist(),
    "changed before": lambda x: [x.clone().tolist(), x.mul_(2).shape],
    "out of it": lambda x: [torch.add(torch.arange(3), 1).tolist(), len(x), x.dtype],
}


@pytest.mark.parametrize("read", READS)
def test_numbers_of_constants_are_those_that_they_have(read: str) -> None:
    def numbers() -> Any:
        return READS[read](torch.linspace(0, 0.3, 6))

    with faking(), torch.device("cpu"), Constants():
        found = numbers()
    assert found == numbers()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2),
        lambda x: x[1:].zero_(),
        lambda x: x.__setitem__(0, 1.0),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.data.fill_(1),
        lambda x: x.untyped_storage().fill_(0),
        lambda x: x.set_(torch.ones(6)),
        lambda x: nn.functional.batch_norm(torch.ones(2, 6), x, torch.ones(6), training=True),
        lambda x: torch._foreach_add_([x], 1),
        lambda x: nn.Parameter(x, requires_grad=False).zero_(),
    ],
)
def test_what_was_changed_has_no_number_any_more(change: Callable[[torch.Tensor], Any]) -> None:
    with faking(), Constants():
        x = torch.linspace(0, 0.3, 6)
        view = x[2:]
        change(x)
        for each in (x, view):
            with pytest.raises(Exception, match="local_scalar_dense"):
                each.tolist()


def test_what_is_no_constant_and_what_is_large_has_no_numbers() -> None:
    with faking(), Constants():
        bits = torch.arange(6) > 1
        bits &= torch.zeros(6, dtype=torch.bool)
        drawn = torch.rand_like(torch.arange(3.0)), torch.empty_like(torch.arange(3.0))
        dropped = nn.functional.dropout(torch.arange(3.0))
        bounded = torch.arange(3.0)
        with _undrawn():
            nn.init.trunc_normal_(bounded)
        others = torch.rand(6) * torch.arange(6), torch.arange(1 << 40), torch.zeros(3)
        for x in (bits, *drawn, dropped, bounded, *others):
            with pytest.raises(Exception, match="local_scalar_dense"):
                x[:3].tolist()
        repeated = torch.arange(4).repeat(1 << 38)  # of which nothing is allocated
        assert repeated.shape == (1 << 40,)


class Depth(nn.Module):
    """As vision models are made: the rates of its blocks are read from a tensor, and the weights
    are drawn within bounds."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.tolist() for rate in torch.linspace(0, 0.2, 4).split([2, 2])]
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)) for part in rates for rate in part)
        )
        for parameter in self.parameters():
            assert nn.init.trunc_normal_(parameter, std=0.02) is parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.blocks(x)
        return made


def traced(build: Callable[[], nn.Module]) -> Trace:
    def inputs(batch: int, _: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(batch, 8)}

    spec = StepSpec(batch=4, tokens=1, inputs=inputs, loss=lambda model, b: model(b["x"]).mean())
    return trace_step(build, spec)


def test_a_constructor_that_reads_constants_is_traced() -> None:
    before = nn.init._no_grad_trunc_normal_
    assert traced(Depth).parameters == 4 * 72
    assert nn.init._no_grad_trunc_normal_ is before
    dropouts = [m.p for m in Depth().modules() if isinstance(m, nn.Dropout)]
    assert dropouts == pytest.approx([0, 0.2 / 3, 0.4 / 3, 0.2])


def test_a_constructor_that_reads_what_it_drew_is_refused() -> None:
    class Reads(Depth):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.rand(1).item()

    with pytest.raises(ConfigError, match=r"build\(\) does not run .* It reads numbers"):
        traced(Reads)
