"""Folders of writers that work side by side."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from lezero.files import folder
from lezero.files.folder import aside, remove_stale


def test_a_sweeper_holds_the_lock_until_the_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a writer between making its folder and locking it would lose it while it works there."""
    (tmp_path / ".tmp-new-1").mkdir()
    refused = []

    def slowly(path: Path, ignore_errors: bool) -> None:
        writer = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refused.append(path)
        os.close(writer)
        os.rmdir(path)

    with monkeypatch.context() as patch:
        patch.setattr(folder.shutil, "rmtree", slowly)
        removed = remove_stale(tmp_path)
    assert removed == refused == [tmp_path / ".tmp-new-1"]


def test_what_a_living_writer_holds_stays(tmp_path: Path) -> None:
    (tmp_path / ".tmp-dead").mkdir()
    with aside(tmp_path, "mine") as mine:
        (mine / "file").write_text("kept")
        remove_stale(tmp_path)
        assert (mine / "file").read_text() == "kept"
        assert os.listdir(tmp_path) == [mine.name]
    assert os.listdir(tmp_path) == []


def test_without_locks_only_an_old_folder_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A young one may be that of a living writer, on a network file system as here."""
    for name in (".tmp-young", ".tmp-old"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".tmp-old", (1, 1))

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert remove_stale(tmp_path) == [tmp_path / ".tmp-old"]
    assert os.listdir(tmp_path) == [".tmp-young"]
