"""What a layer and the whole are judged by where outputs are zeros or infinite."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz
from lezero.compress.quantize import speed, verb
from lezero.compress.quantize.folds import near
from lezero.compress.quantize.layer import relative_error
from lezero.compress.quantize.modules import quantized_layers
from tests.compress.test_quantize import difference

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("wanted", "found", "error"),
    [
        ([3.0, 4.0], [3.0, 4.5], 0.1),
        ([3.0, 4.0, -INF, INF, NAN], [3.0, 4.5, -INF, INF, NAN], 0.1),
        ([3.0, -INF], [3.0, INF], INF),
        ([3.0, -INF], [3.0, 1.0], INF),
        ([3.0, 1.0], [3.0, NAN], INF),
        ([3e30, 4e30], [3e30, 4.5e30], 0.1),
        ([3e-24, 4e-24], [3e-24, 4.5e-24], 0.1),
        ([3e-22, 4e-22, INF], [3e-22, 4.5e-22, INF], 0.1),
        ([0.0, -INF], [0.0, -INF], 0.0),
        ([0.0], [1e-9], INF),
        ([], [], 0.0),
    ],
)
def test_the_error_of_outputs_that_are_not_all_finite(
    wanted: list[float], found: list[float], error: float
) -> None:
    one, two = torch.tensor(wanted), torch.tensor(found)
    assert relative_error(one, two) == pytest.approx(error)
    if one.numel():
        assert near(one, two, 0.2) is (error < 0.2)


def test_an_infinity_hides_no_other_of_its_token() -> None:
    one = torch.tensor([[1.0, -INF]])
    assert near(one, one.clone())
    assert not near(one, torch.tensor([[1.1, -INF]]))


class Barred(nn.Module):
    """A head some of whose outputs are barred."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x))).masked_fill(torch.arange(32) < 5, -INF)


def test_barred_outputs_have_an_error_and_a_budget() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 64)
    for data in (x, [x, 2 * x]):
        model = lz.quantize_(Barred(), lz.Int8Weight(), data=data, objective="size", budget=0.05)
        assert 0 < (lz.quantization_report(model).quality_after or 0) < 0.05
    with pytest.raises(lz.NumericsError, match=r"error of the outputs is 0\.\d+ .*'head'"):
        lz.quantize_(Barred(), lz.Int8Weight(), data=x, objective="size", budget=1e-6)


class Zeros(nn.Module):
    """Its first layer is given nothing but zeros by the first batch; `bias`: of that layer."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=bias), nn.Linear(64, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.first(x) + self.second(y)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "scheme",
    [lz.Int8Weight(bias_correction=True), lz.Int8WeightActivation(bias_correction=True)],
    ids=["w8", "w8a8"],
)
def test_a_first_batch_of_zeros_is_no_nan(scheme: Any, bias: bool) -> None:
    torch.manual_seed(0)
    model, x, zeros = Zeros(bias).eval(), torch.randn(16, 64) + 1, torch.zeros(16, 64)
    with torch.no_grad():
        wanted = model(x, x)
        lz.quantize_(model, scheme, data=[(zeros, x), (x, x)], objective="size")
        assert difference(model(x, x), wanted) < 0.03
    first = lz.quantization_report(model).layers[0]
    assert first.quantized
    assert 0 < (first.error or 0) < 0.02


def test_a_layer_whose_outputs_would_be_useless_stays() -> None:
    """Two large inputs cancel, and their rounding is larger than what is left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).eval()
    with torch.no_grad():
        model[0].weight[:, 0] = 1
        model[0].weight[:, 1] = -0.5
    x = torch.randn(256, 64)
    x[:, 1] += 2e4
    x[:, 0] += 1e4
    scheme = lz.Int8WeightActivation(exact_above=None)
    lz.quantize_(model, scheme, data=x, objective="size")
    first, second = lz.quantization_report(model).layers
    assert not first.quantized
    assert first.reason == "its outputs would be no nearer than zeros"
    assert (first.error or 0) > 1
    assert second.quantized


class Cubed(nn.Module):
    """Its outputs nearly overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 64, dtype=torch.float16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return y * y * y.sign()


@pytest.mark.parametrize("budget", [None, 0.5])
def test_outputs_that_are_not_finite_any_more_are_an_error(budget: float | None) -> None:
    torch.manual_seed(0)
    model, x = Cubed(), torch.randn(64, 64).half()
    with torch.no_grad():
        model.one.bias.zero_()
        model.one.weight.mul_(math.sqrt(65_000 / float(model(x).float().abs().max())))
    assert bool(model(x).isfinite().all())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(lz.NumericsError, match="finite"):
        lz.quantize_(model, lz.Nf4(group=32), data=x, objective="size", budget=budget)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class Masked(nn.Module):
    """Infinities depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return y.masked_fill(y < y.topk(8).values[..., -1:], -INF)


class Fp8(Masked):
    def forward(self, x: Tensor) -> Tensor:
        return self.one(x).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("kind", [Masked, Fp8])
def test_infinities_that_depend_on_the_data_are_no_error(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind()
    lz.quantize_(model, lz.Int4Weight(group=32), data=torch.randn(64, 64), objective="size")
    assert len(quantized_layers(model)) == 1


def test_what_would_not_become_smaller_stays() -> None:
    """Rows of one weight have a byte and a scale each, where they had two bytes."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(1, 64)).bfloat16()
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    first, second = lz.quantization_report(model).layers
    assert first.quantized
    assert not second.quantized
    assert second.reason == "it would not become smaller"


@pytest.mark.parametrize(("after", "kept"), [(0.985, False), (0.975, True)])
def test_what_is_faster_by_less_than_the_margin_stays(
    after: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed.LayerSpeed, "measure", lambda *_: (1.0, after))
    monkeypatch.setattr(verb, "_WHOLE_MARGIN", 1e9)
    model = nn.Sequential(nn.Linear(64, 64))
    lz.quantize_(model, lz.Int8Weight(), data=torch.randn(4, 64))
    assert lz.quantization_report(model).layers[0].quantized is kept


class Routed(nn.Module):
    """Which layer computes depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x) if len(x) == 2 else self.b(x)
        return out


def test_a_layer_that_a_later_batch_reaches_is_judged_on_it() -> None:
    torch.manual_seed(0)
    data = [torch.randn(2, 64), torch.randn(2, 64), torch.randn(5, 64)]
    model = lz.quantize_(Routed(), lz.Int8Weight(), data=data, objective="size")
    assert "no data was seen" not in str(lz.quantization_report(model))


class Passing(nn.Module):
    """Gives what passes a threshold: how much that is depends on values."""

    def __init__(self, parts: bool) -> None:
        super().__init__()
        self.inner, self.parts = nn.Linear(64, 64), parts

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        return [row[row > 0.9] for row in y if row.max() > 1.5] if self.parts else y[y > 0.5]


@pytest.mark.parametrize("parts", [False, True])
def test_outputs_whose_shapes_depend_on_values_are_not_compared(parts: bool) -> None:
    torch.manual_seed(0)
    model, x = Passing(parts), torch.randn(300, 64)
    before = model.inner.weight.detach().clone()
    with pytest.raises(lz.ConfigError, match=r"budget: the shapes of the model's outputs.*metric="):
        lz.quantize_(model, lz.Int4Weight(), data=x, objective="size", budget=0.5)
    assert torch.equal(model.inner.weight, before)
    lz.quantize_(model, lz.Int4Weight(), data=x, objective="size")
    report = lz.quantization_report(model)
    assert report.quality_after is None
    assert "not comparable" in str(report)
    assert report.layers[0].error is not None


def test_a_metric_measures_them() -> None:
    torch.manual_seed(0)
    model, x = Passing(False), torch.randn(300, 64)

    def metric(made: nn.Module) -> float:
        return abs(len(made(x)) - 4000)

    lz.quantize_(model, lz.Int4Weight(), data=x, objective="size", metric=metric, budget=5.0)
    assert lz.quantization_report(model).quality_after is not None
