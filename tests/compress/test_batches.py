"""Calibration batches stay what they are, whatever a model does with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from tests.compress.test_quantize import difference


class Normalizes(nn.Module):
    """Works in place on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor, same: Tensor | None = None) -> Tensor:
        assert same is None or same is x
        return self.inner(x.sub_(0.5).div_(0.25))


@pytest.mark.parametrize("shape", ["one", "list", "tuple", "mapping"])
def test_a_model_that_writes_to_its_inputs(shape: str) -> None:
    torch.manual_seed(0)
    model, x = Normalizes().eval(), torch.rand(32, 64)
    wanted, before = model(x.clone()).detach(), x.clone()
    data: Any = {"one": x, "list": [x, x], "tuple": (x, x), "mapping": {"x": x, "same": x}}[shape]
    scheme = lz.Int8WeightActivation(activations="tensor")
    lz.quantize_(model, scheme, data=data, objective="size", budget=0.05)
    assert torch.equal(x, before)
    assert difference(model(x.clone()).detach(), wanted) < 0.05
