"""Bad input: a clear error that names what is wrong, and the model exactly as it was."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.compress.quantize import report, speed, spill, work
from lezero.core import facts
from tests.compress.test_quantize import small, tokens


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Checks that classes, attributes, parameters, values, strides and modes are as before."""
    kinds = {n: (type(m), {*vars(m), report.REPORT}) for n, m in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    ids = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    training = {name: module.training for name, module in model.named_modules()}
    strides = [parameter.stride() for parameter in model.parameters()]
    yield
    assert {n: (type(m), {*vars(m), report.REPORT}) for n, m in model.named_modules()} == kinds
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == ids
    assert [parameter.stride() for parameter in model.parameters()] == strides
    now = model.state_dict()
    assert list(now) == list(state)
    for name, value in state.items():
        assert torch.allclose(now[name], value, rtol=0, atol=0, equal_nan=True), name
    assert {name: module.training for name, module in model.named_modules()} == training


def nan_at(model: nn.Module) -> nn.Module:
    model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.nan
    return model


def data_with_nan() -> tuple[nn.Module, torch.Tensor]:
    x = torch.randn(4, 64)
    x[1, 2] = torch.nan
    return nn.Sequential(nn.Linear(64, 64)), x


CASES = {
    "no batch": (small, {"data": []}, lz.ConfigError, "no batch"),
    "an empty batch": (small, {"data": [torch.zeros(0, 4)]}, lz.ConfigError, "empty"),
    "text": (small, {"data": ["a"]}, lz.ConfigError, "batch 0 is a str"),
    "a number": (small, {"data": 3}, lz.ConfigError, "got int"),
    "wrong shape": (small, {"data": torch.zeros(2, 3, 4)}, lz.ConfigError, "does not take|shape"),
    "nan weights": (lambda: nan_at(small()), {}, lz.NumericsError, r"layers\.1\.mlp\.up_proj"),
    "no layer fits": (small, {"filter": "no.*"}, lz.ConfigError, "fits the filter 'no.*'embed_tok"),
    "bad filter": (small, {"filter": []}, lz.ConfigError, "filter"),
    "bad objective": (small, {"objective": "both"}, lz.ConfigError, "'speed' and 'size'"),
    "budget of nothing": (small, {"budget": 0.1}, lz.ConfigError, "give metric= or data="),
    "no config": (small, {"config": "int4"}, lz.ConfigError, "Int8Weight"),
    "a group that does not divide": (
        *(small, {"config": lz.Int4Weight(group=96)}, lz.ConfigError),
        "does not divide the 64 inputs of .*32, 64 do",
    ),
    "gptq without data": (small, {"config": lz.Int4Weight(method="gptq")}, lz.ConfigError, "data="),
    "hqq without zero points": (
        *(small, {"config": lz.Int4Weight(method="hqq", zero_point=False)}, lz.ConfigError),
        "zero_point=True",
    ),
    "only static": (
        *(lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), {"config": lz.Int8WeightActivation()}),
        *(lz.ConfigError, "needs calibration data"),
    ),
    "an impossible budget": (
        *(small, {"data": tokens(1), "budget": 1e-6}, lz.NumericsError),
        "budget=1e-06 allows .* leaving out|budget=1e-06 allows .*filter=",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_and_nothing_changes(name):
    make, given, error, words = CASES[name]
    model = make()
    given = {"config": lz.Int4Weight(group=32), "objective": "size", **given}
    with unchanged(model), pytest.raises(error, match=words):
        lz.quantize_(model, given.pop("config"), **given)


def test_nan_activations_name_the_layer():
    model, x = data_with_nan()
    with unchanged(model), pytest.raises(lz.NumericsError, match="enter '0' are NaN"):
        lz.quantize_(model, lz.Int8Weight(), data=x, objective="size")


@pytest.mark.parametrize(
    ("field", "value"),
    [("group", 33), ("method", "gtpq"), ("scales", "best"), ("vocabulary", "int3")],
)
def test_a_bad_field_is_named(field, value):
    with pytest.raises(lz.ConfigError, match=field):
        lz.Int4Weight(**{field: value})


@pytest.mark.parametrize("scales", ["kl", "percentile"])
def test_groups_have_too_few_values_for_histograms(scales):
    for kind, group in (
        (lz.Int4Weight, 64), (lz.Nf4, 64), (lz.Int8Weight, 32), (lz.Fp8, 32),
        (lz.Int8WeightActivation, 128),
    ):  # fmt: skip
        with pytest.raises(lz.ConfigError, match=rf"scales: got '{scales}'.* group \({group}\)"):
            kind(group=group, scales=scales)
        assert kind is lz.Nf4 or kind(group="row", scales=scales).scales == scales


def test_float8_tokens_ask_for_scales_of_rows():
    with pytest.raises(lz.ConfigError, match="activations='token' allowed is 'row'"):
        lz.Fp8(activations="token", group=64)


def test_what_is_no_module_is_named(tmp_path):
    for call in (
        lambda x: lz.quantize_(x, lz.Int8Weight()),
        lz.dequantize_,
        lz.quantization_report,
        lambda x: lz.save_quantized(x, tmp_path / "q"),
        lambda x: lz.load_quantized(tmp_path, x),
    ):
        with pytest.raises(lz.ConfigError, match=r"lz\.\w+: got a dict, allowed is a torch.nn.Mod"):
            call({})
        for wrap in (torch.nn.DataParallel, lambda x: torch.compile(x, backend="eager")):
            with pytest.raises(
                lz.ConfigError, match=r"lz\.\w+: got a module wrapped by .*wrapped\."
            ):
                call(wrap(nn.Sequential(nn.Linear(32, 32))))


def test_orders_that_cannot_work():
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    with unchanged(model), pytest.raises(lz.OrderError, match="the optimizer holds 16"):
        lz.quantize_(model, lz.Int8Weight(), objective="size", optimizer=optimizer)
    with pytest.raises(lz.OrderError, match="no layer of this model is quantized"):
        lz.dequantize_(model)
    with pytest.raises(lz.OrderError, match="no quantization report"):
        lz.quantization_report(model)
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    with pytest.raises(lz.OrderError, match="quantized already"):
        lz.quantize_(model, lz.Int8Weight())
    with torch.device("meta"):
        hollow = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(lz.OrderError, match="meta"):
        lz.quantize_(hollow, lz.Int8Weight())


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_failure_in_the_middle_undoes_everything(method, monkeypatch):
    model, data, done = small().train(), tokens(), []
    real = work.adopt

    def failing(*args):
        done.append(args)
        if len(done) == 9:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(work, "adopt", failing)
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        lz.quantize_(model, lz.Int4Weight(group=32, method=method), data=data, objective="size")
    assert len(done) == 9


SAVING = {
    "awq": lz.Int4Weight(group=32, method="awq", scales="minmax"),
    "gptq": lz.Int4Weight(group=32, method="gptq"),
    "smooth": lz.Int8WeightActivation(smooth=0.5),
}


@pytest.mark.parametrize("full", [True, False], ids=["full", "interrupted"])
@pytest.mark.parametrize("name", SAVING)
@pytest.mark.parametrize("nth", [1, 2, 6, 12])
def test_an_original_that_was_not_saved_is_still_there(nth, name, full, monkeypatch):
    """A norm, a weight that is scaled with it, and some that quantized ones take the place of."""
    model, real, saved = small(), spill.Spill.put, itertools.count(1)
    for layer in model.layers:
        layer.input_layernorm.weight.data.normal_().exp_()

    def on_a_full_disk(path: Any, mode: str, **more: Any) -> Any:
        return open("/dev/full" if mode == "wb" else path, mode, **more)

    def failing(self, key, tree):
        if key[0] == "original" and next(saved) == nth:
            if not full:
                raise KeyboardInterrupt
            monkeypatch.setattr(spill, "open", on_a_full_disk, raising=False)
        real(self, key, tree)

    monkeypatch.setattr(spill.Spill, "put", failing)
    error = lz.CapacityError if full else KeyboardInterrupt
    words = "No space left on device.*LEZERO_CACHE" if full else None
    with unchanged(model), pytest.raises(error, match=words):
        lz.quantize_(model, SAVING[name], data=tokens(), objective="size")
    assert next(saved) == nth + 1


def test_a_budget_names_the_layer_to_blame():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight.data[:, 0] *= 400  # an outlier in each row: int4 has no codes for the rest
    x = torch.randn(32, 64)
    x[:, 0] = 0
    model[0].weight.data[0] = 0
    model[0].bias.data[0] = 0
    config = lz.Int4Weight(group="row", scales="minmax")
    with unchanged(model), pytest.raises(lz.NumericsError, match=r"leaving out '1' would meet it"):
        lz.quantize_(model, config, data=x, objective="size", budget=0.35)
    lz.quantize_(model, config, data=x, objective="size", filter=["0", "2"], budget=0.35)


def test_a_budget_names_the_convolution_whose_batch_norm_was_folded():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8),
    ).eval()  # fmt: skip
    for norm in (model[1], model[4], model[7]):
        norm.running_var.fill_(0.04)
    model[3].weight.data[:, 0] *= 80  # int8 has no codes for the rest
    model[0].weight.data[0] = 0
    model[0].bias.data[0] = 0
    x, config = torch.randn(4, 3, 8, 8), lz.Int8WeightActivation(exact_above=None)
    with unchanged(model), pytest.raises(lz.NumericsError, match=r"leaving out '3' would meet it"):
        lz.quantize_(model, config, data=x, objective="size", budget=0.2)
    calls = iter([1.0, 5.0])
    with unchanged(model), pytest.raises(lz.NumericsError, match="metric is 5"):
        lz.quantize_(
            *(model, config),
            data=x,
            objective="size",
            metric=lambda m: next(calls, float("nan")),
            budget=0.2,
        )


def test_a_model_in_another_memory_format_stays_in_it() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)).eval()
    model.to(memory_format=torch.channels_last)
    model.append(nn.Linear(4, 64))
    model[3].weight.data = torch.randn(4, 64).T
    assert not any(model[index].weight.is_contiguous() for index in (0, 2, 3))
    data = torch.randn(2, 8, 8, 8)
    for scheme in (lz.Int8WeightActivation(), lz.Int8Weight()):
        with unchanged(model), pytest.raises(lz.NumericsError, match="budget"):
            lz.quantize_(model, scheme, data=data, objective="size", budget=1e-9)


def test_a_metric_is_compared_with_what_it_was():
    model, x = small(), tokens(1)[0]
    figures = iter([2.0, 2.1, 2.0, 2.1])
    with pytest.raises(lz.NumericsError, match=r"metric is 2\.1"):
        lz.quantize_(
            model,
            lz.Int8Weight(),
            objective="size",
            metric=lambda m: next(figures, 3.0),
            budget=0.01,
        )
    figures = iter([2.0, 2.1])
    lz.quantize_(
        model, lz.Int8Weight(), data=x, objective="size", metric=lambda m: next(figures), budget=0.1
    )
    report = lz.quantization_report(model)
    assert (report.quality_before, report.quality_after) == (2.0, 2.1)


def test_layers_that_lose_stay_and_the_decision_says_so(monkeypatch):
    def timed(one, two, *_):
        one(), two()
        return (1.0, 0.5) if "up_proj" in str(current) else (1.0, 2.0)

    current = []
    real = work.Work._finish

    def noting(self, site, target, inputs):
        current[:] = [site.name]
        real(self, site, target, inputs)

    monkeypatch.setattr(work.Work, "_finish", noting)
    monkeypatch.setattr(speed, "in_turns", timed)
    monkeypatch.setattr(speed, "_describe", lambda module: str(id(module)))
    monkeypatch.setattr("lezero.compress.quantize.verb._WHOLE_MARGIN", 1e9)
    model, decisions = small(), lz.Decisions()
    kept = model.layers[0].mlp.down_proj
    lz.quantize_(model, lz.Int8Weight(), data=tokens(1), decisions=decisions)
    assert type(model.layers[0].mlp.up_proj).__name__ == "QuantizedLinear"
    assert type(kept) is nn.Linear
    record = decisions.records["quantize layers.0.mlp.down_proj"]
    assert record.chosen == "as it was"
    assert record.candidates["int8"] == {"s": 2.0}
    assert "not faster" in str(lz.quantization_report(model))


def test_a_model_that_gets_slower_is_left(monkeypatch):
    times = iter([1.0, 2.0, 2.0])
    monkeypatch.setattr(speed, "in_turns", lambda *_: (1.0, 0.5))
    monkeypatch.setattr("lezero.compress.quantize.verb._seconds", lambda *_: next(times))
    model = small()
    with unchanged(model):
        lz.quantize_(model, lz.Int8Weight(), data=tokens(1))
    report = lz.quantization_report(model)
    assert report.decisions.records["quantize the model"].chosen == "as it was"
    lz.quantize_(model, lz.Int8Weight(), objective="size")  # nothing was applied before


@pytest.mark.parametrize(
    "scheme",
    [lz.Int8Weight(), lz.Int4Weight(), lz.Int8WeightActivation(), lz.Fp8(activations="token")],
)
def test_inputs_and_ids_that_the_plain_layer_refuses_are_refused(scheme):
    linear = lz.quantize_(nn.Sequential(nn.Linear(64, 64)), scheme, objective="size")
    for width in (5, 63, 65):
        with pytest.raises(lz.ConfigError, match=r"allowed is \(…, 64\)|x is"):
            linear(torch.randn(4, width))


@pytest.mark.parametrize("scheme", [lz.Int8Weight(), lz.Fp8()])
def test_ids_outside_the_vocabulary_are_refused(scheme):
    table = lz.quantize_(nn.Sequential(nn.Embedding(50, 64)), scheme, objective="size")
    assert table(torch.tensor([[0, 49]])).shape == (1, 2, 64)
    for bad in (-1, 50, 63, 10**6):
        with pytest.raises(IndexError):
            table(torch.tensor([[bad]]))


def test_what_needs_data_says_so():
    for scheme in (
        lz.Int8Weight(bias_correction=True), lz.Int8WeightActivation(smooth=0.5),
    ):  # fmt: skip
        with pytest.raises(lz.ConfigError, match="needs calibration data"):
            lz.quantize_(nn.Sequential(nn.Linear(64, 64)), scheme, objective="size")
    with pytest.raises(lz.ConfigError, match="group"):
        lz.Fp8(group=0)


def test_a_later_batch_that_the_model_does_not_take_is_named():
    model = nn.Sequential(nn.Linear(64, 64))
    before = model[0].weight
    data = [torch.randn(2, 64), torch.randn(2, 63)]
    with pytest.raises(lz.ConfigError, match="does not take batch 1"):
        lz.quantize_(model, lz.Int8WeightActivation(), data=data, objective="size")
    assert model[0].weight is before


def test_data_without_an_end_is_refused(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 64))
    endless = itertools.repeat(torch.zeros(2, 64))
    with pytest.raises(lz.ConfigError, match=r"gave 4,097 batches \(.*islice\(data, 64\)"):
        lz.quantize_(model, lz.Int8Weight(), data=endless, objective="size")
    room = dataclasses.replace(facts.memory(), available=4096)
    monkeypatch.setattr("lezero.compress.quantize.batches.memory", lambda: room)
    with pytest.raises(lz.ConfigError, match="gave 5 batches"):
        lz.quantize_(model, lz.Int8Weight(), data=endless, objective="size")
    lz.quantize_(model, lz.Int8Weight(), data=[torch.zeros(2, 64)] * 9, objective="size")


@pytest.mark.parametrize("figure", ["high", None, torch.ones(2), float("inf")])
def test_a_metric_gives_one_finite_number(figure):
    with pytest.raises((lz.ConfigError, lz.NumericsError)) as e:
        lz.quantize_(nn.Linear(64, 64), lz.Int8Weight(), metric=lambda m: figure, objective="size")
    assert str(e.value).startswith(f"metric: gave {figure!r}")


def test_a_bias_that_is_not_finite_is_named():
    model = nn.Sequential(nn.Linear(64, 64))
    with torch.no_grad():
        model[0].bias[3] = torch.nan
    with pytest.raises(lz.NumericsError, match="1 of 64 biases of '0'"):
        lz.quantize_(model, lz.Int8Weight(), objective="size")


def test_filter_and_optimizer_are_what_they_may_be():
    for wrong in ({"filter": 3}, {"optimizer": "adam"}):
        with pytest.raises(lz.ConfigError, match=next(iter(wrong))):
            lz.quantize_(nn.Sequential(nn.Linear(64, 64)), lz.Int8Weight(), **wrong)


@pytest.mark.parametrize("scheme", [lz.Int8Weight(), lz.Int4Weight(), lz.Int8WeightActivation()])
def test_an_input_of_a_type_that_kernels_do_not_take_is_named(scheme):
    data = [torch.zeros(1, 64)]
    model = lz.quantize_(nn.Sequential(nn.Linear(64, 64)), scheme, data=data, objective="size")
    for dtype in (torch.float64, torch.int64):
        with pytest.raises(lz.ConfigError, match=f"got {dtype}, allowed .* fp32, bf16 and fp16"):
            model(torch.zeros(2, 64, dtype=dtype))
    with pytest.raises(lz.ConfigError, match=r"with x.float\(\), .* with model.float\(\)"):
        model.double()(torch.zeros(2, 64, dtype=torch.float64))
    assert model.float()(torch.zeros(2, 64)).dtype == torch.float32
