"""The scales that SmoothQuant and AWQ multiply into channels are those of their papers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize import Scheme
from tests.compress.test_quantize import normed_blocks


def scaled(gains: Tensor, scheme: Scheme, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By what the first layer's channels were divided; its inputs before, and its weight."""
    model = normed_blocks(64, gains)
    norm, layer = model[0]
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        before, weight = norm(x), layer.weight.clone()
    lz.quantize_(model, scheme, data=x, objective="size")
    return gains / norm.weight.detach(), before, weight


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_smoothing_takes_equation_4(alpha: float) -> None:
    torch.manual_seed(0)
    scheme = lz.Int8WeightActivation(smooth=alpha, exact_above=None)
    s, x, weight = scaled(torch.rand(64) * 5 + 0.1, scheme, torch.randn(100, 64))
    wanted = x.abs().amax(0).pow(alpha) / weight.abs().amax(0).pow(1 - alpha)
    torch.testing.assert_close(s, wanted, rtol=1e-3, atol=1e-5)


def test_awq_takes_powers_of_the_mean_size_of_the_inputs() -> None:
    torch.manual_seed(0)
    scheme = lz.Int4Weight(group=32, method="awq", scales="minmax")
    s, x, _ = scaled(torch.randn(64).exp(), scheme, torch.randn(200, 64) ** 3)
    powers = torch.stack([s, x.abs().mean(0)]).log()
    assert powers[0].std() > 0.01
    assert torch.corrcoef(powers)[0, 1] > 0.9999
