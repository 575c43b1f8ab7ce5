"""Few launches a token: near the plain program, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lezero.compress.quantize.ordered import OrderedWeight
from lezero.ops import linear
from lezero.ops.linear import Packed, reference, rows
from lezero.serve import decoding
from tests.ops.interpreted import assert_passes, needs_triton
from tests.serve.decoder_triton import MODELS, model


@needs_triton
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_near_those_of_the_plain_program(name: str) -> None:
    assert_passes("tests.serve.decoder_triton", name)


def multiplied(
    x: Tensor, weight: Packed, bias: Tensor | None, N: int, K: int, bits: int, group: int, **_: Any
) -> Tensor:
    wide = weight.weight if bits == 16 else reference.dequantize_packed(weight, N, K, bits, group)
    return torch.nn.functional.linear(x.float(), wide.float(), bias).to(x.dtype)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of those that need Triton."""
    stub = SimpleNamespace(linear_few=multiplied, suits=lambda dtype, bits, group: True)
    monkeypatch.setitem(sys.modules, "lezero.ops.linear.triton_few", stub)
    monkeypatch.setattr(linear, "triton_few", stub, raising=False)
    monkeypatch.setattr(rows, "takes_rows", lambda place: True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("name", "many"), [("bf16", 1), ("int8", 1), ("several forms", 2)])
def test_layers_with_the_same_inputs_are_joined_where_their_forms_are_one(
    name: str, many: int
) -> None:
    made: Any = model(**MODELS[name])
    assert decoding.fits(made)
    attention = made.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    x = torch.randn(3, 256).to(made.norm.weight)
    wanted = torch.cat([layer(x) for layer in layers], 1)
    products = decoding.products_of(layers, x.dtype)
    assert len(products) == many
    found = decoding.multiply(x, products, None)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    # Nothing is held twice, and the layers go on to work.
    q, k = (getattr(layer.weight, "packed", layer.weight) for layer in layers[:2])
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    assert torch.equal(torch.cat([layer(x) for layer in layers], 1), wanted)


@pytest.mark.usefixtures("kernels")
def test_weights_whose_codes_do_not_say_all_are_left_to_their_layers() -> None:
    """Of GPTQ's act-order inputs lie in another order than codes do; a part of a matrix has rows
    that do not follow each other."""
    made: Any = model(**MODELS["int4"])
    layer = made.layers[0].self_attn.q_proj
    ordered = OrderedWeight(layer.weight.grid, layer.weight.shape, layer.weight.dtype)
    ordered.packed, ordered.scale, ordered.zero = layer.weight.parts()
    ordered.order = torch.randperm(256, dtype=torch.int32)
    assert decoding.fits(made)
    layer.weight = ordered
    assert not decoding.fits(made)

    dense: Any = model(**MODELS["bf16"])
    layer = dense.layers[0].mlp.down_proj
    assert decoding.fits(dense)
    layer.weight.data = torch.randn(512, 256).to(layer.weight.dtype).T[:, ::2]
    assert not decoding.fits(dense)
