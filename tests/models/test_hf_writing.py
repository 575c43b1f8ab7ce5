"""Hugging Face folders are replaced whole or not at all, and what is not theirs is left alone."""

from __future__ import annotations

import copy
import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lezero as lz
from lezero.core.errors import FileError
from lezero.models import Transformer, TransformerConfig, hf_writing, load_hf, save_hf
from lezero.serve.llm import LLM
from lezero.train.run_folder import RunFolder


def build(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    shape = {"vocab": 60, "dim": 32, "layers": 2, "heads": 4, "ffn": 48, "context": 64}
    return Transformer(TransformerConfig(**{**shape, **changes}))


def eps(folder: Path) -> float:
    return load_hf(folder).config.norm_eps


def test_what_lies_beside_stays(tmp_path: Path, monkeypatch: Any) -> None:
    save_hf(build(), tmp_path / "m", shard_bytes=20_000)
    (tmp_path / "m" / "README.md").write_text("mine")
    (tmp_path / "m" / "notes").mkdir()
    (tmp_path / "link").symlink_to("m")
    number = (tmp_path / "m").stat().st_ino
    monkeypatch.chdir(tmp_path / "m")
    save_hf(build(norm_eps=0.1), tmp_path / "link")
    found = {path.name for path in (tmp_path / "m").iterdir()}
    assert found == {"config.json", "model.safetensors", "README.md", "notes"}
    assert eps(tmp_path / "link") == 0.1
    assert (tmp_path / "m").stat().st_ino == number
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("biases", [{"attention_bias": "qkvo"}, {"mlp_bias": True}])
def test_what_no_type_of_transformers_5_takes_is_saved_all_the_same(
    biases: dict[str, Any], tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(logging.getLogger("lezero"), "propagate", True)
    model = build(heads=3, dim=40, head_dim=8, **biases)
    save_hf(model, tmp_path)
    assert "3 heads of dim=40; saved as a llama" in caplog.text
    again = load_hf(tmp_path)
    assert again.config == model.config
    assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))


def test_a_folder_that_is_half_replaced_does_not_open_but_is_saved_to(
    tmp_path: Path, monkeypatch: Any
) -> None:
    save_hf(build(), tmp_path, shard_bytes=20_000)
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if target.name.endswith(".index.json"):
            raise OSError(5, "Input/output error")
        replace(source, target)

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", failing)
        with pytest.raises(FileError, match="Input/output error"):
            save_hf(build(norm_eps=0.1), tmp_path, shard_bytes=20_000)
    with pytest.raises(FileError, match=r"config\.json: a save of this folder was cut off"):
        load_hf(tmp_path)
    with pytest.raises(FileError, match="a save of this folder was cut off"):
        LLM(tmp_path)
    save_hf(build(norm_eps=0.1), tmp_path)
    assert eps(tmp_path) == 0.1


def test_an_export_that_was_cut_off_is_exported_to_again(tmp_path: Path, monkeypatch: Any) -> None:
    model: Any = build()
    lz.quantize_(model, lz.Int8Weight(), objective="size")
    lz.save_quantized(model, tmp_path / "q", layout="compressed-tensors")
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if target.name == "model.safetensors":
            raise OSError(5, "Input/output error")
        replace(source, target)

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", failing)
        with pytest.raises(FileError, match="Input/output error"):
            lz.save_quantized(model, tmp_path / "q", layout="compressed-tensors")
    lz.save_quantized(model, tmp_path / "q", layout="compressed-tensors")
    assert "unfinished" not in (tmp_path / "q" / "config.json").read_text()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_as_it_takes_its_place(tmp_path: Path, monkeypatch: Any) -> None:
    save_hf(build(), tmp_path / "m")
    real = hf_writing._move_in

    def pressing(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        real(*given)

    monkeypatch.setattr(hf_writing, "_move_in", pressing)
    with pytest.raises(KeyboardInterrupt):
        save_hf(build(norm_eps=0.1), tmp_path / "m")
    assert eps(tmp_path / "m") == 0.1
    assert list(tmp_path.glob(".*")) == []


def two() -> dict[float, Transformer]:
    """Models that differ in configuration and weights, by their `norm_eps`."""
    models = {value: build(norm_eps=value) for value in (0.1, 0.2)}
    with torch.no_grad():
        for value, model in models.items():
            model.embed_tokens.weight.fill_(value)
    return models


def whose(folder: Path) -> tuple[float, float]:
    """By the configuration, and by the weights."""
    found = load_hf(folder)
    return found.config.norm_eps, round(found.embed_tokens.weight[0, 0].item(), 3)


def test_who_moves_in_meanwhile_waits(tmp_path: Path, monkeypatch: Any) -> None:
    models = two()
    begun, done, replace = threading.Event(), threading.Event(), os.replace

    def slowly(source: Path, target: Path) -> None:
        if source.name == "config.json" and threading.current_thread() is first:
            begun.set()
            done.wait(0.5)  # for ever, where the other one waits for this one
        replace(source, target)

    first = threading.Thread(target=save_hf, args=(models[0.1], tmp_path / "m"))
    monkeypatch.setattr(os, "replace", slowly)
    first.start()
    assert begun.wait(20)
    save_hf(models[0.2], tmp_path / "m")
    done.set()
    first.join()
    assert whose(tmp_path / "m") == (0.2, 0.2)


def test_two_that_write_one_folder_leave_one_of_theirs(tmp_path: Path) -> None:
    models = two()
    problems: list[Exception] = []

    def write(value: float) -> None:
        try:
            for _ in range(30):
                save_hf(models[value], tmp_path / "m")
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=write, args=(value,)) for value in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert whose(tmp_path / "m") in ((0.1, 0.1), (0.2, 0.2))
    assert list(tmp_path.glob(".*")) == []


def test_a_run_saves_into_its_own_folder(tmp_path: Path) -> None:
    """Which it holds, as a callback of it may do."""
    run, models = RunFolder(tmp_path / "run"), two()
    run.create()
    saving = threading.Thread(target=save_hf, args=(models[0.1], run.path))
    saving.start()
    saving.join(20)
    waits = saving.is_alive()
    run.release()
    saving.join()
    assert not waits
    assert whose(run.path) == (0.1, 0.1)
    assert list(run.path.glob(".*")) == []


def test_weights_that_a_full_disk_refuses(tmp_path: Path) -> None:
    import resource

    save_hf(build(), tmp_path / "m")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(FileError, match="could not be written"):
            save_hf(build(norm_eps=0.1), tmp_path / "m")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert eps(tmp_path / "m") == 1e-5


def test_weights_under_other_names_stay(tmp_path: Path) -> None:
    save_hf(build(), tmp_path, shard_bytes=20_000)
    mine = {"model.fp16.safetensors", "model_backup.safetensors", "model.safetensors.bak"}
    for name in mine:
        (tmp_path / name).write_text("mine")
    save_hf(build(), tmp_path)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"config.json", "model.safetensors", *mine}


@pytest.mark.parametrize("order", [[0], [0, 1, 1]], ids=["dropped", "added"])
def test_a_model_is_written_with_the_blocks_that_it_has(order: list[int], tmp_path: Path) -> None:
    model = build(qk_norm=True)
    model.layers = nn.ModuleList(copy.deepcopy(model.layers[index]) for index in order)
    save_hf(model, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["num_hidden_layers"] == written["max_window_layers"] == len(order)
    again, x = load_hf(tmp_path), torch.arange(6)[None]
    assert torch.equal(again(x), model(x))
