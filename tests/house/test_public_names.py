"""The public names are frozen: a change of `public_names.txt` is a decision, not an accident."""

from __future__ import annotations

import types

import torch

import lezero as lz
from tests.house.floors import ROOT

FROZEN = (ROOT / "tests" / "house" / "public_names.txt").read_text().split()


def test_the_public_names_are_the_frozen_ones() -> None:
    assert sorted(lz.__all__) == FROZEN
    assert set(FROZEN) <= set(dir(lz))


def test_every_public_name_is_there_and_documented() -> None:
    for name in FROZEN:
        value = getattr(lz, name)
        if not isinstance(value, str):
            assert (value.__doc__ or "").strip(), f"lz.{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(lz, "no_such_name")


def test_modules_are_those_of_torch() -> None:
    if "nn" in FROZEN:
        assert isinstance(lz.nn, types.ModuleType)
        assert lz.nn.Module is torch.nn.Module
