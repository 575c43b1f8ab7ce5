"""How much is worked on at once changes no code, no figure and no error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.compress.quantize import parts
from lezero.compress.quantize.layer import relative_error
from lezero.core.errors import NumericsError


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(192, 704), nn.Linear(704, 300))


def test_accelerators_take_large_parts() -> None:
    kinds = [torch.device(kind) for kind in ("cuda", "xpu", "mps")]
    assert all(parts.at_once(kind) >= 100 * parts.at_once(torch.device("cpu")) for kind in kinds)


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
