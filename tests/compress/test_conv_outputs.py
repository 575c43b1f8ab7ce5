"""Outputs of int8 convolutions lie channels last where that is faster, and nobody sees it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize import conv_outputs, verb
from lezero.compress.quantize.modules import quantized_layers
from lezero.compress.quantize.speed import LayerSpeed
from tests.compress.test_conv import LeNet, images
from tests.compress.test_quantize import difference
from tests.ranks import RankPool

FASTER, SLOWER = (1.0, 0.5), (1.0, 0.99)


def classifier() -> nn.Sequential:
    return nn.Sequential(*images(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)).eval()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every layer is twice as fast quantized, and the whole too; "whole" may be set."""
    seen: dict[str, Any] = {"given": [], "whole": FASTER}

    def measure(self: Any, label: str, before: Any, after: Any, xs: Any, given: Any = None) -> Any:
        if given and given[0].dim() == 4:
            seen["given"].append(given[0].is_contiguous(memory_format=torch.channels_last))
        return FASTER

    def of_the_whole(batch: Any, runs: Any, places: Any) -> Any:
        for run in runs:
            run(batch)
        return seen["whole"]

    monkeypatch.setattr(LayerSpeed, "measure", measure)
    monkeypatch.setattr(conv_outputs, "of_the_whole", of_the_whole)
    monkeypatch.setattr(verb, "_seconds", lambda *_: 1.0)
    return seen


def laid(model: nn.Module) -> list[bool]:
    convs = [m.weight for m in quantized_layers(model).values() if len(m.weight.full_shape) == 4]
    return [bool(getattr(weight, "channels_last", None)) for weight in convs]


def decision(model: nn.Module) -> Any:
    return lz.quantization_report(model).decisions.records.get(conv_outputs.TOPIC)


@pytest.mark.parametrize("whole", [FASTER, SLOWER])
@torch.no_grad()
def test_the_whole_is_timed_both_ways(
    whole: tuple[float, float], timed: dict[str, Any], tmp_path: Path
) -> None:
    timed["whole"] = whole
    model, x = classifier(), torch.randn(2, 3, 8, 8)
    wanted = model(x)
    lz.quantize_(model, lz.Int8WeightActivation(), data=x)
    assert timed["given"] == [True, True]
    faster = whole == FASTER
    assert laid(model) == [faster, faster]
    assert decision(model).chosen == (conv_outputs.LAST if faster else conv_outputs.FOLLOW)
    assert [x["s"] for x in decision(model).candidates.values()] == list(whole)
    assert ("lie channels last inside of the model" in str(lz.quantization_report(model))) == faster
    assert difference(model(x), wanted) < 0.05
    lz.save_quantized(model, tmp_path / "q")
    loaded = lz.load_quantized(tmp_path / "q", classifier())
    assert laid(loaded) == laid(model)
    assert torch.equal(loaded(x), model(x))
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    lz.dequantize_(model)
    save_file(model.state_dict(), tmp_path / "plain.safetensors")


class SpatialSoftmax(nn.Module):
    """Its `.view` takes channels last in a batch of one."""

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        return x.view(B * C, H * W).softmax(-1).view(B, C, H, W).sum(3).amax(2)


class Windows(nn.Module):
    """The image minus a little of what `as_strided` reads of the convolutions' memory."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = images()

    def forward(self, x: Tensor) -> Tensor:
        y = self.convs(x)
        B, C, H, W = y.shape
        y = y.as_strided((B, C, H - 2, W - 2, 3, 3), (C * H * W, H * W, W, 1, W, 1)).mean((4, 5))
        return torch.ones_like(y) - 0.01 * y


@pytest.mark.parametrize("batch", [1, 4])
@torch.no_grad()
def test_models_that_need_them_contiguous_get_them_so(batch: int, timed: dict[str, Any]) -> None:
    softmax = nn.Sequential(*images(), SpatialSoftmax()).eval()
    size = {LeNet: 32}
    for model in (LeNet(3).eval(), softmax, Windows().eval()):
        side = size.get(type(model), 9)
        x = torch.randn(batch, 3, side, side)
        wanted = [model(x), model(torch.cat([x, x]))]
        lz.quantize_(model, lz.Int8WeightActivation(), data=x)
        assert not any(laid(model))
        assert decision(model) is None
        for one, other in zip([model(x), model(torch.cat([x, x]))], wanted, strict=True):
            assert difference(one, other) < 0.1


@torch.no_grad()
def test_other_kinds_of_batches_are_looked_at_too(timed: dict[str, Any]) -> None:
    class Squeezed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(len(x), -1) if x.shape[2] > 4 else x.flatten(1)

    model = nn.Sequential(*images(), Squeezed()).eval()
    small, large = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 12, 12)
    lz.quantize_(copy.deepcopy(model), lz.Int8WeightActivation(), data=[small, small])
    lz.quantize_(model, lz.Int8WeightActivation(), data=[small, small, large])
    assert not any(laid(model))
    model(large)


@torch.no_grad()
def test_a_trial_that_fails_leaves_nothing_behind(timed: dict[str, Any]) -> None:
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs, self.depth = images(), list[int]()

        def forward(self, x: Tensor) -> Tensor:
            assert not self.depth, "entered again"
            self.depth.append(1)
            y = self.convs(x)
            y = y.view(len(y), -1)
            self.depth.pop()
            return y

    model, x = Noting().eval(), torch.randn(2, 3, 8, 8)
    lz.quantize_(model, lz.Int8WeightActivation(), data=x)
    assert not any(laid(model))
    model(x)


class Communicating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = classifier()

    def forward(self, x: Tensor) -> Tensor:
        y = self.convs(x)
        top = y.abs().amax()
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        return y / top


def quantized_together() -> list[bool]:
    torch.manual_seed(0)
    model, x = Communicating().eval(), torch.randn(4, 3, 32, 32)
    lz.quantize_(model, lz.Int8WeightActivation(), data=x)
    return laid(model)


def test_a_model_that_communicates(ranks: RankPool) -> None:
    first, second = ranks(2, quantized_together)
    assert first == second


@torch.no_grad()
def test_outputs_of_the_model_lie_as_before(timed: dict[str, Any]) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = images()
    lz.quantize_(model, lz.Int8WeightActivation(), data=x)
    assert model(x).is_contiguous()
    says = "model.to(memory_format=torch.channels_last) allows it"
    assert says in str(lz.quantization_report(model))
    turned = images().to(memory_format=torch.channels_last)
    strides = turned(x).stride()
    lz.quantize_(turned, lz.Int8WeightActivation(), data=x)
    assert laid(turned) == [True, True]
    assert turned(x).stride() == strides
