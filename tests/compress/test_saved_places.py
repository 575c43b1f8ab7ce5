"""Where quantized models are saved: mount points too, and durably."""

from __future__ import annotations

import copy
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.compress.quantize import load_quantized, save_quantized, saved
from lezero.data.tokenizer import bytes_tokenizer
from lezero.files.folder import aside
from lezero.models import Transformer, TransformerConfig
from tests.compress.test_quantize import small, tokens


def quantized(seed: int = 0) -> nn.Module:
    scheme = lz.Int4Weight(group=32, zero_point=False)
    return lz.quantize_(small(seed=seed), scheme, objective="size")


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()[0])


@pytest.mark.parametrize("layout", ["lezero", "compressed-tensors"])
def test_a_mount_point_is_written_into(
    layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "out"
    root.mkdir()

    def mounted(call: Any) -> Any:
        def move(source: Any, target: Any) -> None:
            places = Path(source), Path(target)
            if root in places:
                raise OSError(errno.EBUSY, "Device or resource busy")
            if (root in places[0].parents) != (root in places[1].parents):
                raise OSError(errno.EXDEV, "Invalid cross-device link")
            call(source, target)

        return move

    model = quantized()
    with monkeypatch.context() as patch:
        for name in ("rename", "replace"):
            patch.setattr(os, name, mounted(getattr(os, name)))
        save_quantized(model, root, layout=layout)
    save_quantized(model, tmp_path / "beside", layout=layout)
    assert set(os.listdir(root)) == set(os.listdir(tmp_path / "beside"))
    if layout == "lezero":
        assert torch.equal(logits(load_quantized(root)), logits(model))


def test_every_file_is_durable_before_it_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_tokenizer().save(tmp_path / "tokenizer")
    synced, fsync = set(), os.fsync

    def noted(descriptor: int) -> None:
        synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    model = quantized()
    monkeypatch.setattr(os, "fsync", noted)
    save_quantized(model, tmp_path / "q", tokenizer_folder=tmp_path / "tokenizer")
    written = set(os.listdir(tmp_path / "q"))
    assert {"config.json", "decisions.json", "tokenizer.json"} <= written <= synced


def test_what_a_writer_left_in_an_empty_folder_is_no_content_and_others_work_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with aside(tmp_path, "dead") as made:
        left = made.name
    (tmp_path / left).mkdir()
    write_part = saved.write_part

    def meanwhile(*given: Any) -> Any:
        (tmp_path / "thesis.txt").write_text("years of work")
        return write_part(*given)

    model = quantized()
    with monkeypatch.context() as patch:
        patch.setattr(saved, "write_part", meanwhile)
        with pytest.raises(lz.FileError, match=r"thesis\.txt.* meanwhile"):
            save_quantized(model, tmp_path)
    assert os.listdir(tmp_path) == ["thesis.txt"]
    (tmp_path / "thesis.txt").unlink()
    save_quantized(model, tmp_path)
    assert torch.equal(logits(load_quantized(tmp_path)), logits(model))


def test_a_move_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def failing(source: Any, target: Any) -> None:
        if Path(target).name == "manifest.json":
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        with pytest.raises(lz.FileError, match="Input/output error"):
            save_quantized(quantized(), tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("order", [[0], [0, 1, 1]], ids=["dropped", "added"])
@pytest.mark.parametrize("layout", ["lezero", "compressed-tensors"])
def test_blocks_that_were_dropped_or_added_are_as_many_in_the_folder(
    layout: Any, order: list[int], tmp_path: Path
) -> None:
    shape = {"dim": 64, "heads": 2, "ffn": 64, "vocab": 128}
    model = Transformer(TransformerConfig(**shape, layers=2, attention_bias="qkv"))
    model.layers = nn.ModuleList(copy.deepcopy(model.layers[index]) for index in order)
    lz.quantize_(model, lz.Int4Weight(group=32, zero_point=False), objective="size")
    save_quantized(model, tmp_path / "out", layout=layout)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["num_hidden_layers"] == len(order)
    if layout == "lezero":
        assert torch.equal(logits(load_quantized(tmp_path / "out")), logits(model))
