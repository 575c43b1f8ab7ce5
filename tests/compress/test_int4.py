"""`Int4Weight`: what it makes of the inputs of each kind of layer."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lezero as lz
from tests.compress.test_quantize import difference


def model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 64), nn.Linear(64, 128, bias=False))


@pytest.mark.parametrize(
    ("activations", "vocabulary", "bits", "forms"),
    [
        ("float", "int8", (16, 16), ("int8", "int4 g32", "int8")),
        ("token", "int8", (8, 16), ("int8", "int4 g32 × int8", "int8")),
        ("token", "int8_activations", (8, 8), ("int8", "int4 g32 × int8", "int8 × int8")),
        ("float", "int8_activations", (16, 8), ("int8", "int4 g32", "int8 × int8")),
        ("token", "int4", (8, 16), ("int4 g32", "int4 g32 × int8", "int4 g32")),
    ],
)
@pytest.mark.parametrize("with_data", [True, False])
def test_tokens_are_rounded_to_8_bits_where_asked_to(
    activations: Literal["float", "token"],
    vocabulary: Literal["int8", "int8_activations", "int4"],
    bits: tuple[int, int],
    forms: tuple[str, ...],
    with_data: bool,
) -> None:
    made = model()
    scheme = lz.Int4Weight(group=32, activations=activations, vocabulary=vocabulary)
    data = torch.arange(12).view(2, 6) if with_data else None
    lz.quantize_(made, scheme, data=data, objective="size")
    assert (made[1].x_bits, made[2].x_bits) == bits
    report = lz.quantization_report(made)
    assert tuple(layer.form for layer in report.layers) == forms
    assert all(form in str(report) for form in forms)


def test_outputs_are_those_of_rounded_tokens() -> None:
    layer, x = nn.Linear(64, 32), torch.randn(40, 64)
    scheme = lz.Int4Weight(group=32, activations="token")
    lz.quantize_(nn.Sequential(layer), scheme, data=x, objective="size")
    weight: Any = layer.weight
    outputs = layer(x).detach()
    step = x.abs().amax(1, keepdim=True) / 127
    rounded = torch.round(x / step) * step
    wanted, exact = (F.linear(y, weight.decode(), layer.bias).detach() for y in (rounded, x))
    torch.testing.assert_close(outputs, wanted, rtol=1e-5, atol=1e-5)
    assert difference(outputs, exact) > 1e-3
