"""Weights whose memory something else reads too: what it reads stays what it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize.modules import quantized_layers
from lezero.compress.quantize.tensors import sharing_memory, within_others
from lezero.core.errors import NumericsError

AWQ = lz.Int4Weight(group=32, method="awq", scales="minmax")
SMOOTH = lz.Int8WeightActivation(smooth=0.5)
WITHIN = {AWQ: 0.1, SMOOTH: 0.02}


class Block(nn.Module):
    """A norm with one large channel before a linear layer; `also`: of the input, added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm.weight.data[3] = 30
        self.also: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.two(torch.relu(self.one(self.norm(x))))
        return y if self.also is None else y + self.also(x)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block()).eval()


def tied_by_data() -> nn.Sequential:
    model = blocks()
    model[2].one.weight.data = model[0].one.weight.data
    model[2].norm.weight.data = model[0].norm.weight.data
    return model


def held_by_a_function() -> nn.Sequential:
    model = blocks()
    held = model[0].one.weight.data
    model[0].also = lambda x: 0.3 * x @ held
    return model


@torch.no_grad()
def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("scheme", [AWQ, SMOOTH], ids=["awq", "smooth"])
@pytest.mark.parametrize("make", [tied_by_data, held_by_a_function])
def test_nobody_reads_scaled_values_of_another(make: Any, scheme: Any) -> None:
    data, model = torch.randn(2, 32, 64), make()
    wanted = model(data)
    lz.quantize_(model, scheme, data=data, objective="size")
    assert len(quantized_layers(model)) == 6
    assert off(model(data), wanted) < WITHIN[scheme]


@pytest.mark.parametrize("scheme", [AWQ, SMOOTH], ids=["awq", "smooth"])
@pytest.mark.parametrize("make", [tied_by_data, held_by_a_function])
def test_and_a_refusal_leaves_all_as_it_was(make: Any, scheme: Any) -> None:
    data, model = torch.randn(2, 32, 64), make()
    wanted, before = model(data), copy.deepcopy(model.state_dict())
    with pytest.raises(NumericsError, match="as it was"):
        lz.quantize_(model, scheme, data=data, objective="size", budget=1e-9)
    assert torch.equal(model(data), wanted)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("view", [Tensor.detach, lambda w: w.data.T, lambda w: w.data[:7]])
def test_a_weight_with_a_view_beside_it_stays(view: Any) -> None:
    data, model = torch.randn(2, 32, 64), blocks()
    model[1].kept = [view(model[1].one.weight)]
    lz.quantize_(model, SMOOTH, data=data, objective="size")
    assert len(quantized_layers(model)) == 5
    assert isinstance(model[1].one, nn.Linear)
    assert torch.equal(model[1].kept[0], view(model[1].one.weight))


def test_weights_of_a_flat_buffer_do_not() -> None:
    model = blocks()
    held = [model[0].one.weight, model[0].two.weight]
    model.flat = torch.cat([x.detach().flatten() for x in held])
    for x, part in zip(held, model.flat.split(64 * 64), strict=True):
        x.data = part.view(64, 64)
    data = torch.randn(2, 32, 64)
    wanted = model(data)
    lz.quantize_(model, SMOOTH, data=data, objective="size")
    assert len(quantized_layers(model)) == 6
    assert off(model(data), wanted) < 0.02


def test_what_shares_memory_is_told_by_where_values_lie() -> None:
    flat = torch.zeros(12)
    first, second, across = flat[:6], flat[6:], flat[4:8]
    assert sharing_memory([first, second]) == set()
    assert sharing_memory([flat, first, second]) == {id(x) for x in (flat, first, second)}
    assert sharing_memory([first, across, second]) == {id(x) for x in (first, across, second)}
    assert sharing_memory([first, first, torch.zeros(0), torch.zeros(3, device="meta")]) == set()
    assert within_others([first, second], [flat]) == set()
    assert within_others([first, second], [flat[7:9]]) == {id(second)}
    assert within_others([first, second], [first, across]) == {id(first)}
