"""How much is worked on at once changes no code, no figure and no error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.compress.quantize import parts
from lezero.compress.quantize.layer import relative_error
from lezero.compress.quantize.ordered import OrderedWeight
from lezero.core.errors import NumericsError
from lezero.ops.quantize import Grid, quantize


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(192, 704), nn.Linear(704, 300))


def test_accelerators_take_large_parts() -> None:
    kinds = [torch.device(kind) for kind in ("cuda", "xpu", "mps")]
    assert all(parts.at_once(kind) >= 16 * parts.at_once(torch.device("cpu")) for kind in kinds)


@pytest.mark.parametrize(
    "scheme",
    [lz.Int4Weight(group=64, method="hqq"), lz.Int4Weight(), lz.Int8Weight(scales="mse")],
    ids=lambda scheme: type(scheme).__name__,
)
def test_codes_are_the_same(scheme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (1 << 16, 1 << 24):
        monkeypatch.setattr(parts, "_IN_CACHE", size)
        model = made()
        found.append((lz.quantize_(model, scheme, objective="size"), lz.quantization_report(model)))
    states = [model.state_dict() for model, _ in found]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())
    errors = [[layer.error for layer in report.layers] for _, report in found]
    assert errors[0] == pytest.approx(errors[1], rel=1e-6)
    assert min(errors[0]) > 0


@pytest.mark.parametrize(
    "scheme", [lz.Int4Weight(group=64), lz.Int8Weight(), lz.Nf4(), lz.Int4Weight(group="row")]
)
def test_rows_are_decoded_some_at_a_time(scheme: Any) -> None:
    for layer in lz.quantize_(made(), scheme, objective="size"):
        weight: Any = layer.weight
        whole = weight.decode(torch.float32)
        for count in (1, 16, 17, 100, 5000):
            found = list(weight.decoded_rows(count))
            assert torch.equal(torch.cat([part for _, part in found]), whole)
            assert all(torch.equal(whole[own], part) for own, part in found)


def test_rows_in_gptqs_order_are_decoded_in_the_inputs_order() -> None:
    torch.manual_seed(0)
    grid, order = Grid("int4", 32, scale_dtype="fp16"), torch.randperm(64)
    weight = OrderedWeight.ordered(quantize(torch.randn(40, 64), grid), order, grid, torch.float32)
    found = torch.cat([part for _, part in weight.decoded_rows(16)])
    assert torch.equal(found, weight.decode())


def test_an_error_is_summed_over_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, found = torch.randn(50, 70), torch.randn(50, 70)
    expected = float((found - wanted).norm() / wanted.norm())
    for size in (7, 1 << 16):
        monkeypatch.setattr(parts, "_IN_CACHE", size)
        assert relative_error(wanted, found) == pytest.approx(expected)
    assert relative_error(torch.zeros(9), torch.zeros(9)) == 0


def test_a_bad_weight_is_found_in_any_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_IN_CACHE", 64)
    model = made()
    with torch.no_grad():
        model[1].weight[299, 3:5] = torch.nan
    with pytest.raises(NumericsError, match="2 of 211200 weights"):
        lz.quantize_(model, lz.Int8Weight(), objective="size")
