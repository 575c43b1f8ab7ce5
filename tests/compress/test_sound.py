"""Quantized folders that nothing can be computed with are neither written nor read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.compress.quantize import forms, saved
from tests.compress.test_quantize import small
from tests.compress.test_saved import change
from tests.compress.test_saved import saved as saved_model

STATIC = lz.Int8WeightActivation(activations="tensor", smooth=None)
ASYMMETRIC = lz.Int4Weight(group=32)
BROKEN = [
    ("layers.1.mlp.up_proj.weight.scale", math.nan, ASYMMETRIC, "values of {} are NaN or"),
    ("layers.0.mlp.up_proj.weight.zero", math.inf, ASYMMETRIC, "values of {} are NaN or"),
    ("norm.weight", math.nan, ASYMMETRIC, "1 of 64 values of {} are NaN"),
    ("layers.0.mlp.up_proj.input_scale", math.nan, STATIC, "values of {} are NaN or"),
    ("layers.0.mlp.up_proj.input_scale", 0.0, STATIC, "{} is 0, it should be above 0"),
    ("layers.0.mlp.up_proj.input_scale", -2.0, STATIC, "{} is -2, it should be above 0"),
]


@pytest.mark.parametrize(("name", "value", "scheme", "said"), BROKEN)
def test_values_that_are_none(
    name: str, value: float, scheme: Any, said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    model = saved_model(tmp_path / "whole", scheme)
    with torch.no_grad():
        model.state_dict(keep_vars=True)[name].data.view(-1)[0] = value
    told = said.format(name.replace(".", r"\."))
    with pytest.raises(lz.NumericsError, match=rf"lz\.save_quantized: .*{told}"):
        lz.save_quantized(model, tmp_path / "q")
    assert not (tmp_path / "q").exists()
    monkeypatch.setattr(saved, "unsound", lambda *_: [])
    lz.save_quantized(model, tmp_path / "q")
    monkeypatch.setattr(saved, "unsound", forms.unsound)
    given = small(True)
    before = {key: x.clone() for key, x in given.state_dict().items()}
    for other in (None, given):
        with pytest.raises(lz.FileError, match=told):
            lz.load_quantized(tmp_path / "q", other)
    assert all(torch.equal(x, before[key]) for key, x in given.state_dict().items())


def test_masks_of_infinity_are_whole(tmp_path: Path) -> None:
    def made(value: float) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(64, 64))
        model.register_buffer("mask", torch.full((4, 4), value))
        model.kept = nn.Parameter(torch.full((4, 4), value), requires_grad=False)
        return model

    model, other = made(-math.inf), made(0.0)
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    lz.save_quantized(model, tmp_path / "q")
    lz.load_quantized(tmp_path / "q", other)
    assert bool(other.mask.isinf().all())
    assert bool(other.kept.isinf().all())


@pytest.mark.parametrize("group", [0, -32, 96, 2**64])
def test_a_group_of_more_inputs_than_there_are(group: int, tmp_path: Path) -> None:
    saved_model(tmp_path / "q")

    def edit(fields: dict[str, Any]) -> None:
        layers = fields["documents"]["quantization"]["layers"]
        layers["layers.0.mlp.up_proj"]["grid"]["group"] = group

    change(tmp_path / "q", edit)
    with pytest.raises(lz.FileError, match=r"'layers\.0\.mlp\.up_proj'.*group"):
        lz.load_quantized(tmp_path / "q")


def test_a_layer_that_does_not_say_how_its_outputs_lie_follows_its_inputs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3))
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    lz.save_quantized(model, tmp_path)
    change(tmp_path, lambda f: f["documents"]["quantization"]["layers"]["0"].pop("channels_last"))
    found: Any = lz.load_quantized(tmp_path, nn.Sequential(nn.Conv2d(16, 16, 3)))
    assert found[0].weight.channels_last is False
