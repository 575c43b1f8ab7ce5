"""Hugging Face folders take the place of others whole, and leave alone what is not theirs."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lezero.core.errors import FileError
from lezero.models import Transformer, TransformerConfig, hf_writing, load_hf, save_hf


def build(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    shape = {"vocab": 60, "dim": 32, "layers": 2, "heads": 4, "ffn": 48, "context": 64}
    return Transformer(TransformerConfig(**{**shape, **changes}))


def eps(folder: Path) -> float:
    return load_hf(folder).config.norm_eps


@pytest.mark.parametrize("inside", [False, True])
def test_what_lies_beside_stays(inside: bool, tmp_path: Path, monkeypatch: Any) -> None:
    save_hf(build(), tmp_path / "m", shard_bytes=20_000)
    (tmp_path / "m" / "README.md").write_text("mine")
    (tmp_path / "link").symlink_to("m")
    os.chmod(tmp_path / "m", 0o700)
    if inside:
        (tmp_path / "m" / "notes").mkdir()
        (tmp_path / "m" / "notes" / "a").write_text("mine too")
        monkeypatch.chdir(tmp_path / "m")
    assert save_hf(build(norm_eps=0.1), tmp_path / "link") == tmp_path / "m"
    found = {path.name for path in (tmp_path / "m").iterdir()}
    assert found == {"config.json", "model.safetensors", "README.md", *(["notes"] * inside)}
    assert eps(tmp_path / "m") == 0.1
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.glob(".*")) == []
    if inside:
        assert Path("notes/a").read_text() == "mine too"


def test_a_folder_that_is_half_replaced_does_not_open(tmp_path: Path, monkeypatch: Any) -> None:
    save_hf(build(), tmp_path, shard_bytes=20_000)
    (tmp_path / "notes").mkdir()
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if target.name.endswith(".index.json"):
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(FileError, match="Input/output error"):
        save_hf(build(norm_eps=0.1), tmp_path, shard_bytes=20_000)
    with pytest.raises(FileError, match=r"config\.json"):
        load_hf(tmp_path)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("folder", [False, True])
def test_ctrl_c_as_it_takes_its_place(folder: bool, tmp_path: Path, monkeypatch: Any) -> None:
    save_hf(build(), tmp_path / "m")
    if folder:
        (tmp_path / "m" / "notes").mkdir()
    name = "_move_in" if folder else "commit"
    real = getattr(hf_writing, name)

    def pressing(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        real(*given)

    monkeypatch.setattr(hf_writing, name, pressing)
    with pytest.raises(KeyboardInterrupt):
        save_hf(build(norm_eps=0.1), tmp_path / "m")
    assert eps(tmp_path / "m") == 0.1
    assert list(tmp_path.glob(".*")) == []


def test_two_that_write_one_folder_leave_one_of_theirs(tmp_path: Path) -> None:
    models = {value: build(norm_eps=value) for value in (0.1, 0.2)}
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
    assert eps(tmp_path / "m") in models
    assert list(tmp_path.glob(".*")) == []


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
