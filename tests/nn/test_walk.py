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
