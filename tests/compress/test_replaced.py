"""A folder that is written anew while it is opened: one model or the other, never parts of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lezero as lz
from lezero.compress.quantize import Scheme, load_quantized, opened, save_quantized
from lezero.files import reading
from lezero.models import Transformer
from tests.compress.test_quantize import small, tokens


def made(scheme: Scheme, times: float) -> Transformer:
    model = small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(times)
    return lz.quantize_(model, scheme, data=tokens(), objective="size")


def answer(model: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens()[0])


@pytest.mark.parametrize("when", ["before its tensors are found", "as they are opened"])
def test_what_is_loaded_is_one_model(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(lz.Int8Weight(), 1.0)
    second = made(lz.Int8WeightActivation(smooth=None, exact_above=None), 2.0)
    save_quantized(first, tmp_path / "out")
    where, name = (opened, "_expect") if when.startswith("before") else (reading, "_open_files")
    real, left = getattr(where, name), [second]

    def replacing(*given: Any) -> Any:
        if left:
            save_quantized(left.pop(), tmp_path / "out")
        return real(*given)

    monkeypatch.setattr(where, name, replacing)
    found = load_quantized(tmp_path / "out")
    assert not left
    assert torch.equal(answer(found), answer(second))


def test_a_folder_that_never_stays_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(lz.Int8Weight(), 1.0)
    save_quantized(model, tmp_path / "out")
    real = reading._open_files

    def replacing(*given: Any) -> Any:
        if given[3]:  # not as the writer looks what is there
            save_quantized(model, tmp_path / "out")
        return real(*given)

    monkeypatch.setattr(reading, "_open_files", replacing)
    with pytest.raises(lz.CorruptError, match="missing"):
        load_quantized(tmp_path / "out")
