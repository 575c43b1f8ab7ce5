"""Which layers of W8A8 do not round a token's inputs with one scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize import speed, verb
from lezero.core import groups
from tests.ranks import RankPool


class Parallel(nn.Module):
    """Two layers with the same inputs, then four in a row; `third` is given outliers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.left(x)) + torch.tanh(self.right(x))
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        outliers = torch.zeros(64)
        outliers[3] = 60.0
        return self.third(x + outliers)


def build() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Parallel().eval()
    model.third.weight.data[:, 3] = 0.0  # what makes a token's scale coarse adds nothing
    return model, torch.randn(32, 64)


def quantized(**fields: Any) -> nn.Module:
    model, x = build()
    scheme = lz.Int8WeightActivation(smooth=None, **fields)
    return lz.quantize_(model, scheme, data=x, objective="size")


def bits(model: nn.Module) -> dict[str, int]:
    return {name: layer.x_bits for name, layer in model.named_children()}


def test_inputs_with_outliers_stay_and_the_decision_says_why() -> None:
    model = quantized()
    assert bits(model) == {"left": 8, "right": 8, "first": 8, "second": 8, "third": 16}
    report = lz.quantization_report(model)
    decision = report.decisions.records["inputs of third"]
    assert decision.chosen == "16 bits"
    assert "changes the outputs by" in decision.reason
    forms = {layer.name: layer.form for layer in report.layers}
    assert forms["third"] == "int8"
    assert forms["left"] == "int8 × int8"
    whole = lz.quantization_report(quantized(exact_above=None))
    assert report.quality_after < 0.5 * whole.quality_after


class Wide(Parallel):
    """`third` has 256 inputs, of which one block of 32 is coarse."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.left(x)) + torch.tanh(self.right(x))
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        outliers = torch.zeros(256)
        outliers[3] = 1.5
        return self.third(x.repeat(1, 4) + outliers)


def wide(monkeypatch: pytest.MonkeyPatch, blocks_s: float = 0.5, **options: Any) -> nn.Module:
    """Quantized, where the inputs of `third` in blocks take so long, in 16 bits 0.8."""

    def measured(self: Any, label: str, *given: Any) -> tuple[float, float]:
        seconds = {"int8 × int8": 0.4, "int8 × int8 in blocks": blocks_s, "int8": 0.8}
        return 1.0, seconds[label]

    monkeypatch.setattr(speed.LayerSpeed, "measure", measured)
    monkeypatch.setattr(verb, "_WHOLE_MARGIN", 1e9)
    torch.manual_seed(0)
    model = Wide().eval()
    model.third.weight.data[:, 3] = 0.0
    options = {"objective": "size", **options}
    return lz.quantize_(
        model, lz.Int8WeightActivation(smooth=None), data=torch.randn(32, 64), **options
    )


def test_inputs_in_blocks_where_that_is_enough_and_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = wide(monkeypatch)
    assert {n: (y.x_bits, y.x_block) for n, y in model.named_children()} == {
        **dict.fromkeys(("left", "right", "first", "second"), (8, 0)),
        "third": (8, 32),
    }
    report = lz.quantization_report(model)
    decision = report.decisions.records["inputs of third"]
    assert decision.chosen == "8 bits in blocks"
    assert "in blocks of 32 by" in decision.reason
    (layer,) = (one for one in report.layers if one.name == "third")
    assert (layer.form, layer.seconds_after) == ("int8 × int8 in blocks", 0.5)
    x = torch.randn(5, 256)
    x[:, 7] = 90.0
    blocks = x.unflatten(1, (-1, 32))
    step = blocks.abs().amax(-1, keepdim=True) / 127
    rounded = (torch.round(blocks / step) * step).flatten(1)
    wanted = F.linear(rounded, model.third.weight.decode(torch.float32), model.third.bias)
    torch.testing.assert_close(model.third(x), wanted, rtol=1e-5, atol=1e-4)


def test_inputs_in_blocks_that_are_slow_become_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bits(wide(monkeypatch, blocks_s=0.9))["third"] == 16
    model = wide(monkeypatch, blocks_s=1.1, objective="speed")
    assert bits(model)["third"] == 16


def test_for_speed_blocks_are_better_than_whole_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks it loses more than twice the usual too, but 16 bits are slower than before."""

    def measured(self: Any, label: str, *given: Any) -> tuple[float, float]:
        return 1.0, 0.5 if "×" in label else 1.1

    monkeypatch.setattr(speed.LayerSpeed, "measure", measured)
    monkeypatch.setattr(verb, "_WHOLE_MARGIN", 1e9)
    model, x = build()
    lz.quantize_(model, lz.Int8WeightActivation(smooth=None), data=x)
    assert (model.third.x_bits, model.third.x_block) == (8, 32)
    (model, x), scheme = build(), lz.Int8WeightActivation(smooth=None)
    lz.quantize_(model, scheme, data=x, objective="size")
    assert (model.third.x_bits, model.third.x_block) == (16, 0)


def test_inputs_in_blocks_are_saved_and_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    model: Any = wide(monkeypatch)
    lz.save_quantized(model, tmp_path / "m")
    again: Any = lz.load_quantized(tmp_path / "m", Wide())
    assert again.third.x_block == 32
    x = torch.randn(4, 64)
    assert torch.equal(again(x), model(x))
    assert "activations=8 bits in blocks of 32" in repr(again.third)
    lz.dequantize_(again)
    assert not hasattr(again.third, "x_block")


def test_none_rounds_all() -> None:
    assert set(bits(quantized(exact_above=None)).values()) == {8}


def test_layers_with_the_same_inputs_decide_together() -> None:
    model, x = build()
    x[:, 5] = 200.0
    model.left.weight.data[:, 5] = 0.0  # only this one loses by what `right` needs
    lz.quantize_(model, lz.Int8WeightActivation(smooth=None), data=x, objective="size")
    assert bits(model)["left"] == bits(model)["right"] == 16
    assert "inputs of left, right" in lz.quantization_report(model).decisions.records


def test_for_speed_only_what_is_faster_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(self: Any, label: str, *given: Any) -> tuple[float, float]:
        return (1.0, 0.5 if label.endswith("× int8") else 1.1)

    monkeypatch.setattr(speed.LayerSpeed, "measure", measured)
    monkeypatch.setattr(verb, "_WHOLE_MARGIN", 1e9)
    model, x = build()
    lz.quantize_(model, lz.Int8WeightActivation(smooth=None), data=x)
    report = lz.quantization_report(model)
    decision = report.decisions.records["inputs of third"]
    assert decision.chosen == "8 bits"
    assert "not every layer is faster" in decision.reason
    assert {layer.form for layer in report.layers} == {"int8 × int8"}


def test_what_was_decided_before_is_replayed() -> None:
    first = lz.quantization_report(quantized()).decisions.to_json()
    (topic,) = (one for one in first["decisions"] if one["topic"] == "inputs of third")
    topic["chosen"] = "8 bits"
    first["decisions"].append({**topic, "topic": "inputs of first", "chosen": "16 bits"})
    model, x = build()
    scheme, again = lz.Int8WeightActivation(smooth=None), lz.Decisions.from_json(first)
    lz.quantize_(model, scheme, data=x, objective="size", decisions=again)
    assert bits(model) == {"left": 8, "right": 8, "first": 16, "second": 8, "third": 8}


def bits_of_a_rank() -> dict[str, int]:
    """In a rank that finds other times than the other one."""
    torch.set_num_threads(1)
    speed._MOST_RUNS, verb._WHOLE_MARGIN = 1, 1e9
    times = (1.0, 2.0) if groups.rank() else (1.0, 0.5)
    speed.LayerSpeed.measure = lambda *_: times  # type: ignore[method-assign]
    model, x = build()
    lz.quantize_(model, lz.Int8WeightActivation(smooth=None), data=x)
    return bits(model)


def test_ranks_decide_alike(ranks: RankPool) -> None:
    one, two = ranks(2, bits_of_a_rank)
    assert one == two == {"left": 8, "right": 8, "first": 8, "second": 8, "third": 16}


def test_what_was_kept_is_undone_saved_and_loaded(tmp_path: Any) -> None:
    model = quantized()
    lz.save_quantized(model, tmp_path / "m")
    again = lz.load_quantized(tmp_path / "m", Parallel())
    assert bits(again) == bits(model)
    x = build()[1]
    assert torch.equal(again(x), model(x))


def told_of_a_budget(after: tuple[float, float]) -> tuple[str, float | None]:
    """In a rank of its own, whose metric is `after[rank]` once the model is quantized."""
    model, x = build()
    figures = iter([1.0, after[groups.rank()]])
    options: dict[str, Any] = {"objective": "size", "budget": 0.1}
    try:
        lz.quantize_(model, lz.Int8Weight(), data=x, metric=lambda m: next(figures, 9.0), **options)
    except lz.NumericsError as error:
        assert type(model.left) is nn.Linear
        return str(error), None
    return type(model.left).__name__, lz.quantization_report(model).quality_after


def test_a_budget_is_judged_by_one_rank_for_all(ranks: RankPool) -> None:
    met = ranks(2, told_of_a_budget, (1.05, 5.0))
    assert met == [("QuantizedLinear", 1.05)] * 2
    missed = ranks(2, told_of_a_budget, (5.0, 1.05))
    assert all("metric is 5 (before: 1)" in words for words, _ in missed)
    one, two = ranks(2, told_of_a_budget, (1.05, float("nan")))
    assert "rank 1: metric: gave nan" in one[0]
    assert two[0].startswith("metric: gave nan")
