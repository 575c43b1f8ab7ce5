"""Layers as one matrix: whatever forms they have, its rows are theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lezero.compress.quantize.modules import QuantizedLinear
from lezero.compress.quantize.ordered import OrderedWeight
from lezero.compress.quantize.weights import PackedWeight
from lezero.ops import linear
from lezero.ops.linear import in_rows
from lezero.ops.linear.reference import dequantize_packed
from lezero.ops.quantize import Grid, quantize
from lezero.serve.merged import merged, multiply

K = 192
GRIDS = {
    "4": Grid("int4", 64, True, "fp16"),
    "4 of 32": Grid("int4", 32, True, "fp16"),
    "4 symmetric": Grid("int4", 32, scale_dtype="fp16"),
    "4 a row": Grid("int4"),
    "8": Grid("int8"),
    "8 of 32": Grid("int8", 32, scale_dtype="fp16"),
    "8 of 128": Grid("int8", 128),  # the last group is shorter
    "8 zero points": Grid("int8", 96, True, "bf16"),
}


def layer(N: int, grid: Grid | None, bias: bool = False, **inputs: Any) -> nn.Linear:
    made: Any = nn.Linear(K, N, bias=bias)
    if grid is not None:
        packed = PackedWeight.of(quantize(made.weight.detach(), grid), grid, torch.float32)
        QuantizedLinear(made, packed, made.bias, **inputs).take_over(made)
    return made  # type: ignore[no-any-return]


def rows(layers: list[nn.Linear]) -> Tensor:
    found = [getattr(x.weight, "decode", x.weight.detach)() for x in layers]
    return torch.cat(found)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("second", GRIDS)
@pytest.mark.parametrize("first", GRIDS)
def test_codes_of_any_two_forms_are_joined_as_they_are(
    first: str, second: str, rowwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear.rows, "takes_rows", lambda place: rowwise)
    layers = [layer(24, GRIDS[first], bias=True), layer(40, GRIDS[second]), layer(7, GRIDS[first])]
    weight = merged(layers)
    assert (weight.out_features, weight.in_features) == (71, K)
    assert weight.bits == (8 if "8" in first + second else 4)
    assert in_rows(weight.packed) == rowwise
    wide = dequantize_packed(weight.packed, 71, K, weight.bits, weight.group)
    assert torch.equal(wide, rows(layers))
    x = torch.randn(3, K)
    bias = torch.cat([layers[0].bias.detach(), torch.zeros(47)])
    assert torch.allclose(multiply(x, weight), x @ wide.T + bias, atol=1e-3)


def test_scales_keep_the_type_that_all_have() -> None:
    alike = merged([layer(16, GRIDS["4 symmetric"]), layer(16, GRIDS["4 of 32"])])
    assert alike.packed.scale.dtype == torch.float16
    other = merged([layer(16, GRIDS["4 symmetric"]), layer(16, GRIDS["8"])])
    assert other.packed.scale.dtype == torch.float32


def test_layers_without_codes_and_other_activations_become_bf16() -> None:
    static = layer(16, GRIDS["8"], x_bits=8, input_scale=torch.tensor(0.02))
    assert merged([static]).bits == 16
    for other in (layer(16, None), layer(16, GRIDS["8"], x_bits=8), static):
        assert merged([layer(16, GRIDS["8"]), other]).bits == 16


@pytest.mark.parametrize(("x_bits", "x_block"), [(16, 0), (8, 0), (8, 32)])
def test_products_round_their_inputs_as_the_layer_does(x_bits: int, x_block: int) -> None:
    made = layer(32, GRIDS["8 of 32"], x_bits=x_bits, x_block=x_block)
    x = torch.randn(4, K)
    torch.testing.assert_close(multiply(x, merged([made])), made(x), rtol=1e-5, atol=1e-5)


def test_inputs_of_codes_are_rounded_in_blocks_where_they_were_kept() -> None:
    forms = [layer(16, GRIDS["8"]), layer(16, GRIDS["8"], x_bits=8), layer(16, None)]
    found = [merged([form], x_blocks=True) for form in forms]
    assert [(w.bits, w.x_bits, w.x_block) for w in found] == [
        *((8, 8, 128), (8, 8, 0), (16, 16, 0))
    ]


def test_inputs_in_another_order_are_put_back() -> None:
    """GPTQ's act-order: column k of the codes belongs to input order[k]."""
    made: Any = nn.Linear(K, 32, bias=False)
    grid, order = GRIDS["4"], torch.randperm(K, generator=torch.Generator().manual_seed(0))
    codes = quantize(made.weight.detach()[:, order], grid)
    ordered = OrderedWeight.ordered(codes, order, grid, torch.float32)
    QuantizedLinear(made, ordered, None).take_over(made)
    x = torch.randn(2, K)
    assert torch.allclose(multiply(x, merged([made])), made(x), atol=5e-2)
