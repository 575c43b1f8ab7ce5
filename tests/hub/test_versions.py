"""Modules that convert older states: what a file says of its version is what they are told."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lezero.core.errors import FileError
from lezero.hub import from_pytorch
from tests.nn.versions import Scaled


def model(factor: float = 3.0, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Scaled(factor, **options))


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_values_of_this_version_are_loaded_as_they_are(
    kind: str, on_meta: bool, tmp_path: Path
) -> None:
    path, write = tmp_path / f"model.{kind}", torch.save if kind == "pt" else save_file
    write(model(5.0).state_dict(), path)
    with torch.device("meta" if on_meta else "cpu"):
        made = model(older=False)
    assert from_pytorch(made, path)[1].factor.item() == 5


def test_values_of_an_older_version_are_converted(tmp_path: Path) -> None:
    state: Any = OrderedDict(model(5.0).state_dict())
    state._metadata = {"": {"version": 1}, "0": {"version": 1}, "1": {"version": 1}}
    torch.save(state, tmp_path / "model.pt")
    assert from_pytorch(model(), tmp_path / "model.pt")[1].factor.item() == 10
    refusing = model(older=False)
    with pytest.raises(FileError, match=r"does not fit the module: scaled: its state is too old"):
        from_pytorch(refusing, tmp_path / "model.pt")
    assert refusing[1].factor.item() == 3


def test_a_file_from_before_versions_gives_what_torch_takes_it_to_give(tmp_path: Path) -> None:
    """Batch norms did not save their count then."""
    norm = nn.BatchNorm1d(4)
    old = {k: x + 1 for k, x in norm.state_dict().items() if k != "num_batches_tracked"}
    save_file(old, tmp_path / "model.safetensors")
    assert from_pytorch(norm, tmp_path / "model.safetensors").weight.tolist() == [2.0] * 4


@pytest.mark.parametrize("said", [5, {"": 5}, {3: {}}])
def test_what_is_no_list_of_versions_is_none(tmp_path: Path, said: Any) -> None:
    state: Any = OrderedDict(nn.Linear(2, 2).state_dict())
    state._metadata = said
    torch.save(state, tmp_path / "model.pt")
    made = from_pytorch(nn.Linear(2, 2), tmp_path / "model.pt")
    assert torch.equal(made.weight, state["weight"])
