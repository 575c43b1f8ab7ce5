"""Massive activations: what 16 bits of fixed point lose beside them is told by the layer's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lezero as lz


def report(scheme: Any, massive: float, *, weight: float = 0.0) -> tuple[Any, Any]:
    """Of two layers, the first with one input `massive` times as large as the others and a weight
    that is `weight` times that of the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64, bias=False), nn.Linear(64, 32)).eval()
    x = torch.randn(8, 256)
    x[3, 7] = massive
    model[0].weight.data[:, 7] *= weight
    lz.quantize_(model, scheme, data=x, objective="size")
    return model, lz.quantization_report(model)


def said(found: Any) -> list[str]:
    return [note for note in found.notes if "fixed point" in note]


@pytest.mark.parametrize("scheme", [lz.Int8Weight(), lz.Int4Weight()])
@pytest.mark.parametrize("massive", [2e3, 1e4, 1e5])
def test_layers_that_lose_by_fixed_point_are_named(scheme: Any, massive: float) -> None:
    _, found = report(scheme, massive)
    (note,) = said(found)
    assert note.startswith("inputs of 0 hold values so much larger")
    assert "filter=" in note
    assert "Fp8" in note


def test_the_error_of_the_layer_is_that_of_the_kernel() -> None:
    _, found = report(lz.Int8Weight(), 1e5)
    _, usual = report(lz.Int8Weight(), 1.0)
    assert found.layers[0].error > 5 * usual.layers[0].error


@pytest.mark.parametrize(
    ("scheme", "massive", "weight"),
    [
        (lz.Int8Weight(), 1.0, 0.0),
        (lz.Int8Weight(), 100.0, 0.0),
        (lz.Int8Weight(), 1e5, 1.0),  # the massive one is what the outputs are made of
        (lz.Fp8(), 1e5, 0.0),
        (lz.Int8WeightActivation(smooth=None), 1.0, 0.0),
    ],
)
def test_others_are_not(scheme: Any, massive: float, weight: float) -> None:
    assert not said(report(scheme, massive, weight=weight)[1])


def test_the_bound_that_the_documents_state_holds() -> None:
    model, _ = report(lz.Int8Weight(), 1.0)
    x: Tensor = torch.randn(64, 256)
    x[:, 7] = 3e4
    with torch.no_grad():
        wanted = x @ model[0].weight.decode().T
        most = 3e4 * 1.6e-5 * model[0].weight.decode().abs().sum(1)
        assert bool(((model[0](x) - wanted).abs() <= most).all())
