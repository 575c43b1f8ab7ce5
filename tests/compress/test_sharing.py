"""Weights whose memory something else reads too: what it reads stays what it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize.modules import quantized_layers
from lezero.compress.quantize.tensors import sharing_memory
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


def seen_by_a_list() -> nn.Sequential:
    model = blocks()
    model[0].kept = [model[0].one.weight.data.T, model[0].norm.weight.detach()]
    model[0].also = lambda x: 0.3 * (x * model[0].kept[1]) @ model[0].kept[0]
    return model


def of_a_flat_buffer() -> nn.Sequential:
    """As optimizers and sharded models lay parameters out."""
    model = blocks()
    held = list(model.parameters())
    model.flat = torch.cat([x.detach().flatten() for x in held])
    model.views = list(model.flat.split([x.numel() for x in held]))
    for x, part in zip(held, model.views, strict=True):
        x.data = part.view(x.shape)
    return model


MAKES = [tied_by_data, held_by_a_function, seen_by_a_list, of_a_flat_buffer]


@pytest.mark.parametrize("scheme", [AWQ, SMOOTH], ids=["awq", "smooth"])
@pytest.mark.parametrize("make", MAKES)
def test_nobody_reads_scaled_values_of_another(make: Any, scheme: Any) -> None:
    model, data = make(), torch.randn(2, 32, 64)
    wanted = model(data)
    lz.quantize_(model, scheme, data=data, objective="size")
    assert len(quantized_layers(model)) == 6
    assert off(model(data), wanted) < WITHIN[scheme]


@pytest.mark.parametrize("scheme", [AWQ, SMOOTH], ids=["awq", "smooth"])
@pytest.mark.parametrize("make", MAKES)
def test_and_a_refusal_leaves_all_as_it_was(make: Any, scheme: Any) -> None:
    model, data = make(), torch.randn(2, 32, 64)
    wanted, before = model(data), copy.deepcopy(model.state_dict())
    with pytest.raises(NumericsError, match="as it was"):
        lz.quantize_(model, scheme, data=data, objective="size", budget=1e-9)
    assert torch.equal(model(data), wanted)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_it_leaves_shared_memory_shared() -> None:
    model, data = of_a_flat_buffer(), torch.randn(2, 32, 64)
    with pytest.raises(NumericsError, match="as it was"):
        lz.quantize_(model, SMOOTH, data=data, objective="size", budget=1e-9)
    model.flat.zero_()
    assert not any(bool(x.any()) for x in model.parameters())
    tied = tied_by_data()
    with pytest.raises(NumericsError, match="as it was"):
        lz.quantize_(tied, SMOOTH, data=data, objective="size", budget=1e-9)
    assert tied[0].one.weight.data_ptr() == tied[2].one.weight.data_ptr()


def test_what_shares_memory_is_told_by_where_values_lie() -> None:
    flat = torch.zeros(12)
    first, second, across = flat[:6], flat[6:], flat[4:8]
    assert sharing_memory([first, second]) == set()
    assert sharing_memory([flat, first, second]) == {id(x) for x in (flat, first, second)}
    assert sharing_memory([first, across, second]) == {id(x) for x in (first, across, second)}
    within = flat[1:2]
    assert sharing_memory([first, within, across]) == {id(x) for x in (first, within, across)}
    assert sharing_memory([first, first, torch.zeros(0), torch.zeros(3, device="meta")]) == set()


class Shares(nn.Module):
    """Gives ten times as much to the next block, which has the same layer."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return 10 * self.own(torch.relu(self.shared(x)))


class Again(nn.Module):
    """Calls a layer of its first block once more, on more than that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Shares(nn.Linear(64, 64)), Shares(nn.Linear(64, 64))])

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        return first.shared(second(first(x)))


def in_two_blocks() -> nn.Module:
    shared = nn.Linear(64, 64)
    return nn.Sequential(Shares(shared), Shares(shared))


STATIC = lz.Int8WeightActivation(activations="tensor", smooth=None)


@pytest.mark.parametrize("make", [in_two_blocks, Again])
@torch.no_grad()
def test_a_layer_that_others_call_too_is_calibrated_on_all_its_inputs(make: Any) -> None:
    torch.manual_seed(0)
    model, data = make().eval(), torch.randn(256, 64)
    shared, most = next(x for x in model.modules() if isinstance(x, nn.Linear)), [0.0]
    with shared.register_forward_pre_hook(lambda _, xs: most.append(float(xs[0].abs().max()))):
        model(data)
    lz.quantize_(model, STATIC, data=data, objective="size")
    assert float(shared.input_scale) == pytest.approx(max(most) / 127, rel=0.02)
