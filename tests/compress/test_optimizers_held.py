"""Optimizers over what leaves the model are refused, also where that is known at the end only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64)
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


@pytest.mark.parametrize(
    ("held", "scheme", "told"),
    [
        ("head.bias", lz.Int8Weight(bias_correction=True), "'head.bias' is the first"),
        ("norm.weight", lz.Int8WeightActivation(), "'norm.weight' is the first"),
    ],
)
def test_what_leaves_besides_weights(held: str, scheme: Any, told: str) -> None:
    torch.manual_seed(0)
    model, x = Pictures().eval(), torch.rand(4, 3, 8, 8)
    optimizer = torch.optim.SGD([model.get_parameter(held)], lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = [id(p) for p in model.parameters()]
    with pytest.raises(lz.OrderError, match=f"holds 1 of the parameters that leave .*{told}"):
        lz.quantize_(model, scheme, data=x, objective="size", optimizer=optimizer)
    assert [id(p) for p in model.parameters()] == parameters
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    kept = torch.optim.SGD([model.get_parameter("head.bias")], lr=0.1)
    lz.quantize_(model, lz.Int8WeightActivation(), data=x, objective="size", optimizer=kept)
    assert model.head.bias is kept.param_groups[0]["params"][0]
