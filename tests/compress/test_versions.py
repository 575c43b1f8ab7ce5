"""Quantized folders of models whose own modules convert, refuse or cannot be copied."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.compress.quantize import load_quantized
from tests.nn.versions import Scaled


def model(factor: float = 3.0, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), Scaled(factor, **options), nn.Linear(32, 32))


def saved(made: nn.Module, folder: Path) -> nn.Module:
    lz.quantize_(made, lz.Int8Weight(), objective="size")
    lz.save_quantized(made, folder)
    return made


def test_modules_are_told_their_own_version(tmp_path: Path) -> None:
    made = saved(model(5.0), tmp_path / "q")
    found = load_quantized(tmp_path / "q", model(older=False))
    x = torch.randn(2, 32)
    assert torch.equal(found(x), made.eval()(x))


def test_a_model_that_refuses_its_values_is_as_it_was(tmp_path: Path) -> None:
    saved(model(5.0), tmp_path / "q")
    other = model()
    other[1].register_load_state_dict_pre_hook(_refuse)
    kept, names = dict(other.named_parameters()), set(vars(other))
    with pytest.raises(lz.FileError, match="does not fit the model: not these values"):
        load_quantized(tmp_path / "q", other)
    assert [type(part) for part in other] == [nn.Linear, Scaled, nn.Linear]
    assert all(x is kept[name] for name, x in other.named_parameters())
    assert len(kept) == len(list(other.named_parameters()))
    assert other.training
    assert set(vars(other)) == names


def _refuse(*_: Any) -> None:
    raise ValueError("not these values")


def test_a_model_that_cannot_be_copied_is_loaded(tmp_path: Path) -> None:
    made, other = model(5.0), model()
    for each in (made, other):
        each[1].lock = threading.Lock()
        each[1].locks = [each[1].lock]
    saved(made, tmp_path / "q")
    assert load_quantized(tmp_path / "q", other)[1].lock is other[1].locks[0]
    x = torch.randn(2, 32)
    assert torch.equal(other(x), made.eval()(x))
