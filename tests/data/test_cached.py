"""What cached token files depend on, and what a checkpoint knows them by."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lezero.core.errors import FileError
from lezero.data import DataConfig, prepare, store
from lezero.data.tokenizer import bytes_tokenizer
from tests.data.test_build import config, text_of


def trained_on(cache: Path, **settings: Any) -> bytes:
    data = prepare(DataConfig(tokenizer="bytes", sequence=8, **settings), cache)
    return bytes(t if t < 256 else 0 for t in text_of(data.train, data.tokenizer))


def test_a_file_that_changed_under_its_old_time_is_read_anew(tmp_path: Path) -> None:
    """As `cp -p` and rsync leave it."""
    file = tmp_path / "a.txt"
    file.write_text("the first words")
    before = os.stat(file)
    settings = {"train": [str(file)], "validation": 0.0}
    assert trained_on(tmp_path / "cache", **settings) == b"the first words\0"
    file.write_text("the other words")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert trained_on(tmp_path / "cache", **settings) == b"the other words\0"


def test_a_link_that_says_otherwise_how_a_file_is_read_is_read_anew(tmp_path: Path) -> None:
    """A .json is left out, with the advice to name it .jsonl."""
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.json").write_text('{"text": "more"}\n')
    (tmp_path / "b.jsonl").symlink_to("b.json")
    for name, text in (("b.json", b"some text\0"), ("b.jsonl", b"some text\0more\0")):
        settings = {"train": [str(tmp_path / "a.txt"), str(tmp_path / name)], "validation": 0.0}
        assert trained_on(tmp_path / "cache", **settings) == text


def test_a_file_that_is_held_out_from_now_on_is_no_longer_trained_on(tmp_path: Path) -> None:
    files = [str(tmp_path / f"{name}.txt") for name in "abc"]
    for path in files:
        Path(path).write_text(f"text {path[-5]}")
    for count, text in ((2, b"text a\0text b\0"), (1, b"text a\0")):
        settings = {"train": files[:count], "validation": files[count:]}
        assert trained_on(tmp_path / "cache", **settings) == text


def test_a_tokenizer_counts_by_what_it_holds(tmp_path: Path) -> None:
    """That of a GGUF is written anew for each `lz compress`: its texts were tokenized each time."""
    (tmp_path / "a.txt").write_text("some text")
    made = bytes_tokenizer()
    folders = []
    for name in "one", "two", "other":
        made.save(tmp_path / name)
        if name == "other":
            (tmp_path / name / "special_tokens_map.json").write_text("{}")
        asked = config(tmp_path / "a.txt", tokenizer={"folder": str(tmp_path / name)})
        folders.append(prepare(asked, tmp_path / "cache").folder)
    assert folders[0] == folders[1] != folders[2]
    prepare(config(tmp_path / "a.txt"), tmp_path / "cache")
    (tmp_path / "nothing").mkdir()
    asked = config(tmp_path / "a.txt", tokenizer={"folder": str(tmp_path / "nothing")})
    with pytest.raises(FileError, match="nothing"):
        prepare(asked, tmp_path / "cache")


def test_the_model_beside_a_tokenizer_counts(tmp_path: Path) -> None:
    """Tokens beyond its size stay text, and its end is the texts' where the tokenizer names none;
    the tokenizer may be named by its folder or its file."""
    (tmp_path / "a.txt").write_text("some text")
    model = tmp_path / "model"
    bytes_tokenizer().save(model)
    for place in (model, model / "tokenizer.json"):
        found = set()
        for name in ("", "config.json", "generation_config.json"):
            if name:
                (model / name).write_text("{}")
            asked = config(tmp_path / "a.txt", tokenizer={"folder": str(place)})
            found.add(prepare(asked, tmp_path / "cache").folder)
        assert len(found) == 3
        for name in ("config.json", "generation_config.json"):
            (model / name).unlink()


def test_a_checkpoint_knows_rows_of_another_tokenizer(tmp_path: Path) -> None:
    """Tokens may have the same numbers and mean other words."""
    (tmp_path / "a.txt").write_text("some text")
    data = prepare(config(tmp_path), tmp_path / "cache")
    manifest = {**store.read_manifest(data.folder), "tokenizer": "another"}
    assert store.open_rows(data.folder, manifest, "train", 8).digest != data.train.digest
