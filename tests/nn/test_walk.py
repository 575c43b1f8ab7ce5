"""A walk over a model meets what torch's own walks meet."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lezero.nn.walk import drop_gradients, modules_of

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


class Shares(nn.Module):
    """A part by two names, one without any module, one that is a script."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.parts = nn.ModuleList([nn.Sequential(self.line, nn.ReLU()), self.line])
        self.nothing = None
        self.register_module("absent", None)
        self.script = torch.jit.script(nn.Sequential(nn.Linear(3, 3)))
        self.register_parameter("without", None)
        self.own = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.script(self.parts[0](x)) * self.own


class Hidden(nn.Module):
    """Tells of parts that are not among its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.head = [nn.Linear(3, 3), nn.BatchNorm1d(3)], nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.parts[1](self.parts[0](x)))

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield from super().named_modules(memo, prefix, remove_duplicate)
        for index, part in enumerate(self.parts):
            yield f"{prefix}parts.{index}", part


class Clearing(nn.Linear):
    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("inside", [False, True])
def test_what_a_class_tells_of_itself_counts(inside: bool):
    model = Hidden()
    whole = nn.Sequential(nn.ReLU(), model) if inside else model
    assert set(model.parts) <= set(modules_of(whole))
    whole(torch.ones(2, 3)).sum().backward()
    drop_gradients(whole)
    assert all(p.grad is None for part in model.parts for p in part.parameters())
    clearing = Clearing(3, 3)
    drop_gradients(clearing)
    assert clearing.cleared == 1


def test_every_module_once():
    model = Shares()
    found = modules_of(model)
    assert found[0] is model
    assert len(found) == len(set(found)) == len(list(model.modules()))
    assert set(found) == set(model.modules())


def test_every_gradient_is_dropped():
    model = Shares()
    model(torch.ones(2, 3)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    drop_gradients(model)
    assert all(p.grad is None for p in model.parameters())
