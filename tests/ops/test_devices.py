"""Tensors of one call are on one device: with one on meta, torch would run no kernel and give
memory that nobody has written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lezero.compress.quantize.modules import QuantizedLinear
from lezero.compress.quantize.weights import PackedWeight
from lezero.core.errors import ConfigError
from lezero.ops.attention import attention
from lezero.ops.cross_entropy import cross_entropy_sum
from lezero.ops.linear import (
    Packed,
    conv_int8,
    embedding_int,
    linear_bf16,
    linear_fp8,
    linear_int,
    linear_rounded,
    pack,
    pack_bf16,
)
from lezero.ops.quantize import Grid, quantize

GRID = Grid("int8", 32, True)
CODES = quantize(torch.randn(20, 70), GRID)
W = pack(*CODES, bits=8)
X, BIAS = torch.randn(3, 70), torch.zeros(20)
SIZES: Any = {"out_features": 20, "bits": 8, "group": 32}
PARTS: dict[str, Tensor] = W._asdict()
EIGHTS = quantize(torch.randn(20, 70), Grid("fp8"))
PLACES: Any = {"x_scale": torch.tensor([0.1]), "x_zero": torch.tensor([3])}


def held(weight: Tensor, scale: Tensor, zero: Tensor) -> Packed:
    return Packed(weight, scale, zero)


CALLS: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]] = {
    "linear_int": (
        lambda x, bias, **w: linear_int(x, held(**w), bias, **SIZES),
        {"x": X, **PARTS, "bias": BIAS},
    ),
    "linear_int, a static scale": (
        lambda x, x_scale, **w: linear_int(x, held(**w), x_scale=x_scale, x_bits=8, **SIZES),
        {"x": X, **PARTS, "x_scale": torch.ones(1)},
    ),
    "linear_bf16": (
        lambda **given: linear_bf16(**given, out_features=20),
        {"x": X, "weight": pack_bf16(torch.randn(20, 70)), "bias": BIAS},
    ),
    "linear_fp8": (
        linear_fp8,
        {"x": X, "codes": EIGHTS.codes, "scale": EIGHTS.scale, "bias": BIAS},
    ),
    "embedding_int": (
        lambda ids, **w: embedding_int(ids, held(**w), in_features=70, bits=8, group=32),
        {"ids": torch.tensor([1, 2]), **PARTS},
    ),
    "conv_int8": (
        conv_int8,
        {
            "x": torch.randn(2, 3, 8, 8),
            "weight": torch.ones(4, 3, 3, 3, dtype=torch.int8),
            "scale": torch.rand(4),
            "bias": torch.zeros(4),
            **PLACES,
        },
    ),
    "cross_entropy_sum": (
        lambda logits, targets: cross_entropy_sum(logits, targets),
        {"logits": torch.randn(3, 9), "targets": torch.tensor([1, 8, -100])},
    ),
    "attention": (
        lambda **given: attention(*given.values(), causal=True),
        dict.fromkeys("qkv", torch.randn(1, 2, 5, 32).bfloat16()),
    ),
}
ROUNDED = (
    lambda x, bias, **w: linear_rounded(x, held(**w), bias, **SIZES),
    {"x": X.bfloat16(), **PARTS, "bias": BIAS},
)
"""Apart, since it needs AMX."""
AWAY = [(*call, name) for call in (*CALLS.values(), ROUNDED) for name in call[1]]


def refused(op: Callable[..., Tensor], given: dict[str, Tensor], name: str) -> None:
    said = rf"\b{name} (is |torch\.bfloat16 \([\d, ]+\) )?on meta"
    with pytest.raises(ConfigError, match=said) as caught:
        op(**given)
    assert "on cpu" in str(caught.value)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(("op", "given", "name"), AWAY)
def test_a_tensor_on_meta_beside_others_is_named(
    op: Callable[..., Tensor], given: dict[str, Tensor], name: str, trains: bool
) -> None:
    mixed = {**given, name: given[name].to("meta")}
    first = next(iter(given))
    if mixed[first].is_floating_point():
        mixed[first] = mixed[first].detach().requires_grad_(trains)
    refused(op, mixed, name)


@pytest.mark.parametrize("call", CALLS)
def test_fake_tensors_are_where_the_real_ones_are(call: str) -> None:
    op, given = CALLS[call]
    shape = op(**given).shape
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in given.items()}
        assert op(**fake).shape == shape
        for name in given:
            refused(op, {**fake, name: torch.empty_like(fake[name], device="meta")}, name)


@pytest.mark.parametrize("trains", [False, True])
def test_a_layer_that_was_moved_to_meta(trains: bool) -> None:
    was = nn.Linear(70, 20)
    weight = PackedWeight.of(CODES, GRID, torch.float32)
    layer = QuantizedLinear(was, weight, was.bias).requires_grad_(trains)
    assert layer(X).shape == (3, 20)
    refused(layer.to("meta"), {"input": X}, "weight")


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_weights_of_few_dims_are_refused(dims: int) -> None:
    shape = (2,) * dims
    with pytest.raises(ConfigError, match="linear_bf16: the weight is"):
        linear_bf16(X, torch.zeros(shape, dtype=torch.bfloat16), out_features=20)
    weight = W._replace(weight=torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="linear_int: the weight is"):
        linear_int(X, weight, **SIZES)
    with pytest.raises(ConfigError, match="embedding_int: the weight is"):
        embedding_int(torch.arange(2), weight, in_features=70, bits=8, group=32)
