"""What the report says: of the whole, of what no layer holds, and where all was undone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize import speed, verb
from lezero.compress.quantize.modules import quantized_layers


class Experts(nn.Module):
    """The weights of all experts in one parameter, as transformers' mixtures have them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 64, 64))
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.einsum("mk,enk->mn", x, self.up))


def test_weights_in_no_layer_are_named() -> None:
    model = nn.Sequential(Experts(), nn.Conv2d(1, 64, 16, padding="same"))
    model.forward = model[0].forward
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    report = lz.quantization_report(model)
    assert report.left_over == {"Experts.up": 16384, "Conv2d.weight": 16384}
    assert "in no layer that can be quantized: 89% of weights (Experts.up 16,384," in str(report)
    assert report.to_dict()["left_over"] == report.left_over


def test_layers_that_the_filter_leaves_are_not() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    lz.quantize_(model, lz.Int8Weight(), objective="size", filter="0")
    assert "in no layer" not in str(lz.quantization_report(model))


def test_weights_of_another_type_are_told() -> None:
    with pytest.raises(lz.ConfigError, match=r"its weights float64.* in float32, bfloat16 or"):
        lz.quantize_(nn.Linear(64, 64).double(), lz.Int8Weight())


def test_a_model_that_was_left_is_reported_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed.LayerSpeed, "measure", lambda *args: (1.0, 2.0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    lz.quantize_(model, lz.Int8WeightActivation(), data=torch.randn(2, 3, 8, 8))
    assert not quantized_layers(model)
    report = lz.quantization_report(model)
    assert report.notes == []
    assert report.quality_after == report.quality_before
    assert report.seconds_after == report.seconds_before
    assert report.bytes_after == report.bytes_before


def test_so_are_the_layers_of_one_that_was_slower_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speed, "in_turns", lambda *_: (1.0, 0.5))
    monkeypatch.setattr(verb, "_slower", lambda *args: "the model as a whole was not faster")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    lz.quantize_(model, lz.Int8Weight(), data=torch.randn(2, 64))
    report = lz.quantization_report(model)
    assert {(x.form, x.bits, x.quantized) for x in report.layers} == {("as it was", 32.0, False)}
    assert "as it was: int8 by itself is faster" in str(report)
    assert "layers: 2 as it was" in str(report)
    assert not quantized_layers(model)


def test_the_first_run_is_not_the_time_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_MOST_RUNS", 4)
    calls = []
    model = nn.Sequential(nn.Linear(64, 64))
    model.register_forward_hook(lambda *args: calls.append(1))
    lz.quantize_(model, lz.Int8Weight(), data=torch.randn(2, 64), objective="size")
    assert len(calls) > 8
