"""Mixed precision by torch.autocast, around the verb and inside of the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lezero as lz
from tests.compress.test_quantize import difference, small, tokens

AWQ = lz.Int4Weight(group=32, method="awq", scales="minmax")


@pytest.mark.parametrize("scheme", [lz.Int8WeightActivation(), AWQ])
def test_autocast_around_the_verb_hides_no_trial(scheme: Any) -> None:
    model = small()
    made, data = copy.deepcopy(model), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        lz.quantize_(made, scheme, data=data, objective="size")
        assert torch.is_autocast_cache_enabled()
    with torch.no_grad():
        assert difference(made(data[0]), model(data[0])) < 0.15


class Mixed(nn.Module):
    """Computes in bf16 by itself, but for its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.image = nn.Conv1d(1, 4, 3)
        self.last = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.second(F.relu(self.first(x)))
            x = x + self.image(x[:, None]).mean((1, 2), keepdim=True)[..., 0]
            with torch.autocast("cpu", enabled=False):
                return self.last(x.float())


@pytest.mark.parametrize("objective", ["size", "speed"])
@pytest.mark.parametrize(
    "scheme",
    [lz.Int8WeightActivation(), lz.Int8Weight(bias_correction=True), lz.Fp8()],
    ids=["w8a8", "w8", "fp8"],
)
def test_a_model_that_computes_under_autocast(scheme: Any, objective: Any) -> None:
    torch.manual_seed(0)
    model, x = Mixed().eval(), torch.randn(16, 64)
    with torch.no_grad():
        wanted = model(x)
        lz.quantize_(model, scheme, data=x, objective=objective)
        assert difference(model(x), wanted) < 0.06
        if objective == "size":
            assert all(layer.quantized for layer in lz.quantization_report(model).layers)
        for outside in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=outside):
                again = lz.quantize_(Mixed().eval(), scheme, data=x, objective=objective)
                assert again(x).isfinite().all()
