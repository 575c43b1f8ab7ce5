"""The report's figures are those that are measured and counted, each in its own place."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.compress.quantize import LayerReport, QuantizationReport, speed, verb
from lezero.compress.quantize.modules import quantized_layers
from lezero.core import device

SECONDS = {64: (0.004, 0.001), 32: (0.020, 0.005)}
"""Of a layer before and after, by its outputs."""


def layers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer takes the seconds of its outputs."""

    def measure(self: Any, label: str, before: Any, *given: Any) -> tuple[float, float]:
        return SECONDS[before[0].out_features]

    monkeypatch.setattr(speed.LayerSpeed, "measure", measure)


def model_takes(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> list[float]:
    """The whole model takes these, each time that it is measured; those that are left."""
    left = list(seconds)
    monkeypatch.setattr(verb, "_seconds", lambda *given: left.pop(0))
    return left


@pytest.mark.parametrize("objective", ["size", "speed"])
def test_each_layer_has_its_own_times(objective: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers_take(monkeypatch)
    monkeypatch.setattr(verb, "_WHOLE_MARGIN", 1e9)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    lz.quantize_(model, lz.Int8Weight(), data=torch.randn(2, 64), objective=objective)
    report = lz.quantization_report(model)
    times = [(layer.seconds_before, layer.seconds_after) for layer in report.layers]
    assert times == [(0.004, 0.001), (0.020, 0.005)]
    head, *rows = (re.split(r"\s{2,}", line)[-2:] for line in str(report).splitlines()[:3])
    assert head == ["before", "after"]
    assert rows == [["4 ms", "1 ms"], ["20 ms", "5 ms"]]


def test_times_of_a_layer_that_is_left_are_those_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed.LayerSpeed, "measure", lambda *given: (0.001, 0.004))
    model = nn.Sequential(nn.Linear(64, 64))
    lz.quantize_(model, lz.Int8Weight(), data=torch.randn(2, 64))
    (layer,) = lz.quantization_report(model).layers
    assert (layer.reason, layer.seconds_before, layer.seconds_after) == ("not faster", 0.001, 0.004)


def test_the_whole_of_a_report() -> None:
    layers = [
        LayerReport("a", "int8", 4096, 8.5, 0.0123, 0.004, 0.001),
        LayerReport("b", "as it was", 1000, 32.0, 0.02, 0.002, 0.003, "not faster", ("c",)),
    ]
    report = QuantizationReport(
        layers, 4 << 20, 1 << 20, "error of the outputs", 0.0, 0.0125, 0.040, 0.010, ["one", "two"]
    )
    assert str(report).splitlines() == [
        "layer    form                   weights   bits  error  before  after",
        "a        int8                     4,096   8.50   1.2%    4 ms   1 ms",
        "b (= c)  as it was: not faster    1,000  32.00   2.0%    2 ms   3 ms",
        "",
        "layers: 1 int8, 1 as it was",
        "size: 4.00 MiB → 1.00 MiB (0.25 of it)",
        "error of the outputs: 0 → 0.01250",
        "one batch: 40 ms → 10 ms (4.00 times as fast)",
        "note: one",
        "note: two",
    ]


def test_the_model_is_measured_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    layers_take(monkeypatch)
    left = model_takes(monkeypatch, 0.040, 0.010)
    model = nn.Sequential(nn.Linear(64, 64))
    lz.quantize_(model, lz.Int8Weight(), data=torch.randn(2, 64))
    report = lz.quantization_report(model)
    assert (report.seconds_before, report.seconds_after, left) == (0.040, 0.010, [])
    assert "one batch: 40 ms → 10 ms (4.00 times as fast)" in str(report).splitlines()


def test_bytes_are_those_of_all_that_is_held_and_of_shared_weights_once() -> None:
    model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 64), nn.Linear(64, 128, bias=False))
    model[2].weight = model[0].weight
    model.register_buffer("table", torch.zeros(10))
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    report = lz.quantization_report(model)
    beside = 4 * 64 + 4 * 10  # the bias and the buffer
    assert report.bytes_before == 4 * (128 * 64 + 64 * 64) + beside
    assert report.bytes_after == (128 * 64 + 4 * 128) + (64 * 64 + 4 * 64) + beside
    held = {id(x): x.nbytes for x in (*model.parameters(), *model.buffers())}
    assert report.bytes_after == sum(held.values())
    assert "size: 48.3 KiB → 13.0 KiB (0.27 of it)" in str(report).splitlines()


BITS: dict[str, tuple[Any, float]] = {
    "int8, fp32 of each row": (lz.Int8Weight(), 8 + 32 / 64),
    "int8, fp32 of the whole, for each row": (lz.Int8Weight(group="tensor"), 8 + 32 / 64),
    "int8, fp16 twice": (lz.Int8Weight(group=32, zero_point=True), 8 + 32 / 32),
    "int4, fp16 twice": (lz.Int4Weight(group=32), 4 + 32 / 32),
    "int4, fp16 twice, of each row": (lz.Int4Weight(group="row"), 4 + 32 / 64),
    "int4, fp16": (lz.Int4Weight(group=32, zero_point=False), 4 + 16 / 32),
    "nf4, fp16": (lz.Nf4(group=32), 4 + 16 / 32),
    "fp8, fp32 of each row": (lz.Fp8(), 8 + 32 / 64),
}


def bits(scheme: Any, size: float = 1.0, dtype: torch.dtype = torch.float32, **given: Any) -> float:
    """Of a layer of 64 inputs and 32 outputs, with weights `size` times as large as usual."""
    model = nn.Sequential(nn.Linear(64, 32)).to(dtype)
    with torch.no_grad():
        model[0].weight.mul_(size)
    lz.quantize_(model, scheme, objective="size", **given)
    (layer,) = lz.quantization_report(model).layers
    assert layer.quantized
    assert f"{layer.bits:.2f}" in str(lz.quantization_report(model))
    held = [x.nbytes for x in (*model[0].weight.buffers(), *model[0].buffers(recurse=False))]
    assert layer.bits == 8 * sum(held) / layer.weights
    return layer.bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", BITS)
def test_bits_count_codes_scales_and_zero_points(kind: str, dtype: torch.dtype) -> None:
    scheme, wanted = BITS[kind]
    assert bits(scheme, dtype=dtype) == wanted


def test_bits_count_scales_as_they_are_stored() -> None:
    """fp16 does not hold these scales, which are fp32 then."""
    assert bits(lz.Int4Weight(group=32), size=1e7) == 4 + 64 / 32
    assert bits(lz.Int4Weight(group=32, zero_point=False), size=1e7) == 4 + 32 / 32


def test_bits_count_the_scale_of_inputs() -> None:
    scheme = lz.Int8WeightActivation(activations="tensor", smooth=None)
    assert bits(scheme, data=torch.randn(8, 64)) == 8 + 32 / 64 + 32 / (64 * 32)


def test_bits_of_what_is_left_are_those_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed.LayerSpeed, "measure", lambda *given: (1.0, 2.0))
    for dtype, wanted in ((torch.float32, 32), (torch.bfloat16, 16)):
        model = nn.Sequential(nn.Linear(64, 32)).to(dtype)
        lz.quantize_(model, lz.Int8Weight(), data=torch.randn(2, 64, dtype=dtype))
        assert [layer.bits for layer in lz.quantization_report(model).layers] == [wanted]


@pytest.mark.parametrize(
    ("after", "kept"),
    [((1.01,), True), ((1.03, 1.03), False), ((1.03, 1.01), True), ((1.03, 2.0), False)],
)
def test_a_whole_that_is_slower_by_more_than_the_margin_twice_is_undone(
    after: tuple[float, ...], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed.LayerSpeed, "measure", lambda *given: (1.0, 0.5))
    left = model_takes(monkeypatch, 1.0, *after)
    model = nn.Sequential(nn.Linear(64, 64))
    lz.quantize_(model, lz.Int8Weight(), data=torch.randn(2, 64))
    report = lz.quantization_report(model)
    assert left == []
    assert bool(quantized_layers(model)) is kept
    assert report.seconds_after == (min(after) if kept else 1.0)
    assert ("the model as a whole was not faster" in str(report)) is not kept


def test_times_end_when_the_devices_of_the_layers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[set[torch.device]] = []
    monkeypatch.setattr(device, "synchronize", lambda places: waited.append(set(places)))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    lz.quantize_(model, lz.Int8Weight(), data=torch.randn(2, 64), objective="speed")
    assert waited
    assert set().union(*waited) == {torch.device("cpu")}
