"""`lz.nn` is `torch.nn` and more."""

import importlib

import pytest
import torch

import lezero.nn as lznn


def test_module_is_torchs():
    assert lznn.Module is torch.nn.Module
    assert lznn.Parameter is torch.nn.Parameter


def test_every_public_name_of_torch_nn_is_there():
    public = [name for name in dir(torch.nn) if not name.startswith("_")]
    for name in public:
        assert getattr(lznn, name) is getattr(torch.nn, name), name


@pytest.mark.parametrize("name", ["functional", "init", "utils", "parallel"])
def test_submodules_import_as_in_torch(name):
    found = importlib.import_module(f"lezero.nn.{name}")
    assert found is importlib.import_module(f"torch.nn.{name}")
