"""Weights in the files of a Hugging Face folder: each once, where the index says, in a type."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lezero.core.errors import FileError
from lezero.models import Transformer, TransformerConfig, load_hf, save_hf

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """The files of a model in shards."""
    config = TransformerConfig(vocab=60, dim=32, layers=2, heads=4, ffn=48, context=64)
    save_hf(Transformer(config), tmp_path, shard_bytes=20_000)
    return sorted(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("twin", [NORM, "norm.weight"])
def test_a_tensor_that_is_there_twice_is_refused(twin: str, shards: list[Path]) -> None:
    holder = next(path for path in shards if NORM in load_file(path))
    other = next(path for path in shards if path != holder)
    tensors = load_file(other)
    save_file({**tensors, twin: torch.zeros(32)}, other)
    with pytest.raises(FileError) as told:
        load_hf(holder.parent)
    for named in (NORM, twin, holder.name, other.name):
        assert named in str(told.value)
    save_file(tensors, other)
    if twin != NORM:
        save_file({**load_file(holder), twin: torch.zeros(32)}, holder)
        with pytest.raises(FileError, match=rf"'norm\.weight', which {holder.name} holds too, as"):
            load_hf(holder.parent)


def test_an_index_that_the_files_do_not_follow_is_refused(shards: list[Path]) -> None:
    index = shards[0].with_name(INDEX)
    data = json.loads(index.read_text())
    other = next(path.name for path in shards if path.name != data["weight_map"][NORM])
    index.write_text(json.dumps({"weight_map": {**data["weight_map"], NORM: other}}))
    with pytest.raises(FileError, match=f"looks for '{NORM}' in {other}, but .* holds it"):
        load_hf(index.parent)
    needless = {"model.layers.0.self_attn.rotary_emb.inv_freq": other}
    index.write_text(json.dumps({"weight_map": {**data["weight_map"], **needless}}))
    load_hf(index.parent)
    index.write_text(json.dumps(data))
    load_hf(index.parent)


@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_what_is_no_regular_file_is_not_opened(name: str, shards: list[Path]) -> None:
    path = shards[0].with_name(name)
    path.with_name(INDEX).unlink()
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("nothing")):
        make(path)
        with pytest.raises(FileError, match=rf"{name}: not a regular file"):
            load_hf(path.parent)
        (path.rmdir if path.is_dir() else path.unlink)()


def test_a_shard_that_is_a_pipe_is_not_opened(shards: list[Path]) -> None:
    shards[1].unlink()
    os.mkfifo(shards[1])
    with pytest.raises(FileError, match=f"{shards[1].name}: named in {INDEX}, but no file"):
        load_hf(shards[1].parent)


def test_only_types_that_compute_are_loaded(tmp_path: Path) -> None:
    save_hf(Transformer(TransformerConfig(vocab=60, dim=32, layers=1, heads=4, ffn=48)), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8):
        save_file({**tensors, NORM: torch.ones(32).to(dtype)}, file)
        for wanted in (None, torch.float32):
            with pytest.raises(
                FileError, match=f"norm.weight is {dtype}, convert it to fp32, bf16"
            ):
                load_hf(tmp_path, wanted)
    save_file({**tensors, NORM: torch.ones(32, dtype=torch.float64)}, file)
    assert load_hf(tmp_path, torch.float32).norm.weight.dtype == torch.float32
    entry = {"dtype": "F6_E2M3", "shape": [32], "data_offsets": [0, 24]}
    head = json.dumps({NORM: entry}).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(24))
    with pytest.raises(FileError, match=r"norm\.weight' is of a type that is not read .*F6_E2M3"):
        load_hf(tmp_path)
