"""Where quantized models are saved: mount points too, and durably."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.compress.quantize import load_quantized, save_quantized, saved
from lezero.data.tokenizer import bytes_tokenizer
from lezero.files.folder import aside
from lezero.hub.opened import open_model
from lezero.models import Transformer, TransformerConfig, save_hf
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
    rename, out = os.rename, tmp_path / "out"
    given = sentence_folder(tmp_path / "a", Pooling="1_Pooling")
    out.mkdir()

    def failing(source: Any, target: Any) -> None:
        if Path(target).name == "manifest.json":
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        with pytest.raises(lz.FileError, match="Input/output error"):
            save_quantized(quantized(), out, tokenizer_folder=given)
    assert os.listdir(out) == []


def sentence_folder(root: Path, **stages: str) -> Path:
    """A tokenizer beside what sentence-transformers writes; stages: folders by kind."""
    bytes_tokenizer().save(root)
    listed = [{"type": f"sentence_transformers.models.{k}", "path": v} for k, v in stages.items()]
    (root / "modules.json").write_text(json.dumps(listed))
    for name in ("sentence_bert_config.json", "config_sentence_transformers.json"):
        (root / name).write_text(json.dumps({"of": name}))
    for place in stages.values():
        (root / place).mkdir(exist_ok=True)
        (root / place / "config.json").write_text(json.dumps({"in": place}))
    return root


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


SENTENCE = {"modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"}


def test_how_texts_become_vectors_is_kept_and_saved_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sentence_folder(tmp_path / "a", Transformer="0_Transformer", Pooling="1_Pooling")
    (given / "1_Pooling" / "notes.txt").write_text("not about pooling")
    model, out = quantized(), tmp_path / "q"
    synced, fsync = set(), os.fsync

    def noted(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}").rpartition(".tmp-")[2])
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", noted)
        save_quantized(model, out, tokenizer_folder=given)
    kept = SENTENCE | {"1_Pooling/config.json"}
    assert {name for name in tree(out) if (given / name).is_file()} >= kept
    assert not any("Transformer" in name or "notes" in name for name in tree(out))
    for name in kept:
        assert (out / name).read_bytes() == (given / name).read_bytes()
        assert any(path.endswith(f"/{name}") for path in synced)
    assert any(path.endswith("/1_Pooling") for path in synced)
    save_quantized(model, out, tokenizer_folder=given)
    assert tree(out) >= kept
    (out / "1_Pooling" / "thesis.txt").write_text("years of work")
    with pytest.raises(lz.FileError, match=r"other files \(1_Pooling\)"):
        save_quantized(model, out, tokenizer_folder=given)
    (out / "1_Pooling" / "thesis.txt").unlink()
    save_quantized(model, out)
    assert not tree(out) & kept
    (out / "2_Mine").mkdir()
    with pytest.raises(lz.FileError, match=r"other files \(2_Mine\)"):
        save_quantized(model, out)


@pytest.mark.parametrize(
    "place",
    ["..", "../b", "../../b", "/etc", "1_Pooling/deep", "", ".", ".hidden", "config.json",
     "manifest.json", "tensors-00000.safetensors"],
)  # fmt: skip
def test_no_stage_leaves_the_folder_or_takes_the_place_of_a_file(
    place: str, tmp_path: Path
) -> None:
    given = sentence_folder(tmp_path / "a")
    (tmp_path / "b").mkdir()
    for folder in (tmp_path, tmp_path / "b"):
        (folder / "config.json").write_text("{}")
    if place and not place.startswith(("/", "..")):
        (given / place).mkdir(parents=True, exist_ok=True)
        if place != "config.json":  # the tokenizer's folder may hold no such folder, but nothing
            (given / place / "config.json").write_text("{}")  # reads it before it is copied
    if place == "config.json":
        (given / place).rmdir()
    stages = [{"type": "x.Pooling", "path": place}, {"type": "x.Pooling", "path": 3}, 7]
    (given / "modules.json").write_text(json.dumps(stages))
    out = save_quantized(quantized(), tmp_path / "out" / "q", tokenizer_folder=given)
    assert {path.name for path in out.iterdir() if path.is_dir()} == set()
    assert tree(out) >= SENTENCE
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "config.json", "out"]
    assert os.listdir(tmp_path / "out") == ["q"]


def test_stages_that_cannot_be_read_are_copied_as_they_are(tmp_path: Path) -> None:
    given = sentence_folder(tmp_path / "a", Pooling="1_Pooling")
    (given / "modules.json").write_text("{not json")
    out = save_quantized(quantized(), tmp_path / "q", tokenizer_folder=given)
    assert tree(out) & (SENTENCE | {"1_Pooling/config.json"}) == SENTENCE
    assert (out / "modules.json").read_text() == "{not json"


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


def test_other_weights_over_a_quantized_folder_are_refused(tmp_path: Path) -> None:
    save_quantized(quantized(), tmp_path)
    with pytest.raises(lz.FileError, match=r"holds manifest\.json.*name a new folder"):
        save_hf(small(seed=1), tmp_path)
    load_quantized(tmp_path)


def test_other_weights_that_lie_over_a_quantized_folder_are_told(tmp_path: Path) -> None:
    save_hf(small(seed=1), tmp_path / "other")
    save_quantized(quantized(), tmp_path / "out")
    for path in (tmp_path / "other").iterdir():  # as another program's `save_pretrained` does
        shutil.copy(path, tmp_path / "out")
    for opens in (load_quantized, open_model, lz.LLM):
        with pytest.raises(lz.FileError, match=r"two models lie here.*move manifest\.json"):
            opens(str(tmp_path / "out"))
    for path in (tmp_path / "out").glob("*"):
        if path.name == "manifest.json" or path.name.startswith("tensors-"):
            path.unlink()
    assert torch.equal(logits(open_model(str(tmp_path / "out"))[0]), logits(small(seed=1)))


def test_a_description_that_was_left_beside_float_weights_is_named(tmp_path: Path) -> None:
    save_hf(small(), tmp_path)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    with pytest.raises(lz.FileError, match=r"quantize_config\.json says.*move quantize_config"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("name", ["vocab.txt", "spiece.model", "sentencepiece.bpe.model"])
def test_every_file_of_a_tokenizer_goes_along(name: str, tmp_path: Path) -> None:
    """Without its words a tokenizer opens all the same, and takes each for an unknown one."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer" / name).write_text("[PAD]\n[UNK]\nhello\n")
    model = lz.quantize_(small(), lz.Int8Weight(), objective="size")
    for _ in range(2):
        save_quantized(model, tmp_path / "out", tokenizer_folder=tmp_path / "tokenizer")
        assert (tmp_path / "out" / name).read_text() == "[PAD]\n[UNK]\nhello\n"
