"""Folders of writers that work side by side."""

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest

from lezero.files import folder
from lezero.files.folder import aside, remove_stale


def left(root: Path, label: str, machine: str = "", boot: str = "") -> Path:
    """A folder that a writer of this machine and boot, or another, left behind."""
    made = root / f".tmp-{label}-{machine or folder._machine()}-{boot or folder._boot()}-1-0123abcd"
    made.mkdir()
    return made


def test_a_sweeper_holds_the_lock_until_the_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a writer between making its folder and locking it would lose it while it works there."""
    new = left(tmp_path, "new")
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
    assert removed == refused == [new]


def test_what_a_living_writer_holds_stays(tmp_path: Path) -> None:
    left(tmp_path, "dead")
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
    young, old = left(tmp_path, "young"), left(tmp_path, "old")
    os.utime(old, (1, 1))

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert remove_stale(tmp_path) == [old]
    assert os.listdir(tmp_path) == [young.name]


def test_only_names_that_are_given_here_are_swept(tmp_path: Path) -> None:
    """The folder may be one of a user, who begins names as he likes."""
    mine = {".tmp-data", ".tmp-", ".tmp-run-3", ".tmp-gone-x", ".tmp-a-0123abcd", ".tmp-a-1-0123"}
    for name in mine:
        (tmp_path / name).mkdir()
    (tmp_path / ".tmp-gone-step-00000001-0123abcd").mkdir()
    left(tmp_path, "with\na line")
    with aside(tmp_path, "new"):
        pass
    assert set(os.listdir(tmp_path)) == mine


def test_what_another_machine_writes_stays_for_a_day(tmp_path: Path) -> None:
    """Whose lock is not seen here, on a network file system."""
    living, dead = (left(tmp_path, name, *["00000000"] * 2) for name in "xy")
    os.utime(dead, (1, 1))
    assert remove_stale(tmp_path) == [dead]
    assert os.listdir(tmp_path) == [living.name]


def test_what_an_earlier_boot_of_this_machine_left_is_swept_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fill the disk for a day. Another machine may go by the same id and name, as pods of
    two clusters do, and writes there meanwhile: its lock is not seen here."""
    monkeypatch.setattr(folder, "_machine", lambda: "0123abcd")  # not that of the boot
    hours = time.time() - 2 * 3600
    dead = [left(tmp_path, "rebooted", boot="00000000"), left(tmp_path, "container", "00000000")]
    young = left(tmp_path, "young", boot="00000000")
    writing = left(tmp_path, "writing", boot="00000000")
    (writing / "inside").mkdir()
    (writing / "inside" / "large").write_text("which grows")
    other = left(tmp_path, "other", "00000000", "00000000")
    for path in (dead[0], writing / "inside", writing, other):
        os.utime(path, (hours, hours))
    assert sorted(remove_stale(tmp_path)) == sorted(dead)
    assert set(os.listdir(tmp_path)) == {path.name for path in (young, writing, other)}


def test_a_machine_is_known_by_its_id_and_its_name_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"id": "3d1219c7c4c5404aaa1f6d2a48adfda4\n", "boot": "a", "name": "node-1"}

    def machine(**changes: str) -> str:
        now = {**known, **changes}
        monkeypatch.setattr(
            Path, "read_text", lambda path, _: now[{"machine-id": "id"}.get(path.name, "boot")]
        )
        monkeypatch.setattr(folder.platform, "node", lambda: now["name"])
        folder._boot.cache_clear()
        folder._machine.cache_clear()
        return folder._machine()

    try:
        assert machine() == machine(boot="b")
        assert len({machine(), machine(name="node-2"), machine(id="0" * 32)}) == 3
        for less in ({"id": ""}, {"id": "uninitialized\n"}, {"name": "localhost"}):
            assert machine(**less) != machine(**less, boot="b")
    finally:
        folder._boot.cache_clear()
        folder._machine.cache_clear()
