"""What calibration counts of a layer's inputs, and that every batch of it counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.methods import GPTQ, Nearest
from tests.compress.method_conformance import inputs_of

COUNTED = ("absmax", "mean", "mean_square", "mean_size", "hessian")


def same(found: Inputs, wanted: Inputs, names: tuple[str, ...]) -> None:
    for name in names:
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), msg=name)


def test_divided_inputs_have_the_statistics_of_divided_values() -> None:
    torch.manual_seed(0)
    x, s = torch.randn(50, 16) + 1, torch.rand(16) * 3 + 0.5
    found = inputs_of(x)
    found.divide(s)
    same(found, inputs_of(x / s), ("first", *COUNTED))


def test_batches_count_by_their_tokens() -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 16) + torch.arange(60)[:, None] / 10
    same(inputs_of(x[:5], x[5:45], x[45:]), inputs_of(x), COUNTED)


EVERY: dict[str, Any] = {
    "static": lz.Int8WeightActivation(activations="tensor", smooth=None),
    "gptq": lz.Int4Weight(group=32, method="gptq", scales="minmax"),
    "mse": lz.Int4Weight(group=32, scales="mse"),
    "bias": lz.Int4Weight(group=32, scales="minmax", bias_correction=True),
}


@pytest.mark.parametrize("kind", EVERY)
def test_every_batch_counts_outside_of_blocks_too(kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 32)
    w, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    x = torch.randn(2, 100, 64) @ torch.randn(2, 64, 64)
    data = [x[0], 5 * x[1] + 3]
    lz.quantize_(nn.Sequential(layer), EVERY[kind], data=data, objective="size")
    both, weight = inputs_of(*data), layer.weight
    if kind == "static":
        assert float(layer.input_scale) * 127 == pytest.approx(float(both.absmax.max()))
    elif kind == "bias":
        wanted = bias + (w - weight.decode()) @ both.mean
        torch.testing.assert_close(layer.bias.detach(), wanted, rtol=1e-3, atol=1e-4)
    else:
        method = GPTQ() if kind == "gptq" else Nearest()
        made, found = method.codes(w, weight.grid, EVERY[kind].scales, both), weight.unpacked()
        torch.testing.assert_close(found.scale.float(), made.scale)
        assert (found.codes != made.codes).float().mean() < 0.01  # the order of sums rounds ties


@pytest.mark.parametrize("sign", [1, -1])
def test_one_scale_covers_both_ends(sign: int) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), sign * (torch.rand(50, 64) * 4 - 3)
    lz.quantize_(nn.Sequential(layer), EVERY["static"], data=x, objective="size")
    assert float(layer.input_scale) * 127 == pytest.approx(float(x.abs().max()))


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (-3.0, 0.1), (0.5, 2.0), (-4.0, -1.0)])
def test_zero_points_of_images_are_those_of_their_range(low: float, high: float) -> None:
    torch.manual_seed(0)
    data = torch.rand(2, 2, 3, 8, 8) * (high - low) + low
    data[0, 0, 0, 0, 0], data[1, 1, 2, 3, 4] = low, high  # each end in another batch
    conv = nn.Conv2d(3, 8, 3)
    lz.quantize_(nn.Sequential(conv), lz.Int8WeightActivation(), data=list(data), objective="size")
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255
    assert float(conv.input_scale) == pytest.approx(scale)
    assert int(conv.input_zero) == round(-low / scale)
