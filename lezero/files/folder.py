"""Folders that appear whole or not at all, and files that are what they say.

[Note: how a folder becomes visible]
A writer works in `.tmp-…` beside the target, holds an advisory lock on that folder while it lives,
makes every file and the folder durable (fsync), and renames it. A reader therefore sees a complete
folder or none. A folder whose lock is free belongs to a dead writer and is removed by the next one.
On a network file system a lock may be seen by the machine alone that holds it, so the name tells
which one made the folder, and others remove it only when nothing was written to it for a day. It
tells the boot too: a machine that has started anew waits for an hour only, since its writer is dead
unless another machine goes by the same id and name.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import platform
import re
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from lezero.core.errors import CorruptError, FileError
from lezero.core.interrupts import held_interrupts

_TMP = ".tmp-"
_OURS = re.compile(r"\.tmp-(?:.+-([0-9a-f]{8})-([0-9a-f]{8})-\d+|gone-.+)-[0-9a-f]{8}", re.DOTALL)
"""Names that are given here; a writer's tells its machine and its boot."""
_HELD = ".lezero-writing"
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_STALE_SECONDS, _STALE_HERE_SECONDS = 24 * 3600.0, 3600.0
"""What was written to last so long ago has no living writer elsewhere, or on a machine of this
one's id and name."""
_SAID = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EBUSY: "it is in use, as a mount point is, and cannot be replaced",
}


@contextmanager
def aside(root: Path, label: str) -> Iterator[Path]:
    """A fresh locked folder inside `root`, removed again unless it has been committed."""
    make_folder(root)
    remove_stale(root)
    path, lock = _locked(root, label)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


@contextmanager
def held_alone(folder: Path) -> Iterator[None]:
    """Waits for other writers that hold `folder` so, and keeps them out; where the file system
    knows no locks it keeps nobody out. The lock is a file there while it is held: the folder's own
    is that of a run or of a writer aside, who may be who asks, and would wait for itself."""
    path = folder / _HELD
    lock = _waited_for(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: who waits for it sees that it is gone
        os.close(lock)


def aside_for(target: Path) -> AbstractContextManager[Path]:
    """A fresh folder for what becomes `target`: beside it, or within it where it is there and holds
    nothing. It may be a mount point then, which no other folder can take the place of."""
    within = target.is_dir() and not contents(target)
    return aside(target if within else target.parent, target.name)


def contents(folder: Path) -> set[str]:
    """The names in a folder, what writers have aside apart."""
    return {name for name in os.listdir(folder) if not _OURS.fullmatch(name)}


def move_in(made: Path, target: Path, last: str) -> None:
    """Moves the files of `made` into `target`, which holds nothing else; `last` makes them seen."""
    if there := contents(target):
        raise FileError(f"{target}: {min(there)} was written to it meanwhile; name another folder")
    moved: list[Path] = []
    with held_interrupts():
        try:
            for name in sorted(os.listdir(made), key=lambda name: (name == last, name)):
                if name == last:
                    sync_folder(target)
                os.rename(made / name, target / name)
                moved.append(target / name)
        except OSError:
            for path in moved:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            raise
        sync_folder(target)


def commit(made: Path, target: Path, spared: Path | None = None) -> None:
    """Makes the finished folder `made` visible as `target`, replacing one that stands there.

    `spared` is where that one goes instead; it comes back when `made` cannot take its place.
    """
    sync_folder(made)
    if spared is not None:
        with suppress(FileNotFoundError):
            os.rename(target, spared)
    try:
        os.rename(made, target)
    except OSError as error:
        if spared is not None:
            with suppress(FileNotFoundError):
                os.rename(spared, target)
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        _exchange(made, target)
    sync_folder(target.parent)


def discard(path: Path) -> None:
    """Takes a folder out of sight in one step, then frees its space."""
    hidden = path.with_name(f"{_TMP}gone-{path.name}-{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def remove_stale(root: Path) -> list[Path]:
    """Removes what dead writers left in `root`; returns the folders removed."""
    removed = []
    for entry in os.scandir(root):
        name = _OURS.fullmatch(entry.name)
        if name is None or not entry.is_dir(follow_symlinks=False):
            continue
        path = Path(entry.path)
        told = name[1] is None or name[2] == _boot()  # by its lock
        least = _STALE_HERE_SECONDS if name[1] == _machine() else _STALE_SECONDS
        if (told or _quiet(path, least)) and _swept(path):
            removed.append(path)
    return removed


def write_file(path: Path, data: bytes) -> None:
    """Writes a small file whole or not at all: aside, made durable, renamed."""
    try:
        with aside(path.absolute().parent, path.name) as made:
            write_durable(made / path.name, data)
            os.replace(made / path.name, path)
            sync_folder(path.absolute().parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def write_durable(path: Path, data: bytes) -> None:
    """Writes a new file that is on the disk when this returns."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def open_regular(name: str, where: str, folder: int | None = None) -> int:
    """Opens a regular file for reading, never through a link; returns its descriptor.

    `folder` is the descriptor that `name` is relative to, so that files keep belonging together
    when a writer renames their folder meanwhile. Raises `CorruptError` when it is missing or not
    a regular file and `FileError` when the system refuses to open it.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        raise CorruptError(f"{where}: missing") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptError(
                f"{where}: a symbolic link, which is never followed; copy the folder with its "
                "files in place of links, as `cp -rL` does"
            ) from None
        raise FileError(f"{where}: cannot be opened ({error.strerror})") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptError(f"{where}: not a regular file")
    return descriptor


def read_small(name: str, where: str, limit: int, folder: int | None = None) -> bytes:
    """The bytes of a regular file of at most `limit` bytes."""
    descriptor = open_regular(name, where, folder)
    with open(descriptor, "rb") as file:
        try:
            large = os.fstat(descriptor).st_size > limit  # a sparse one costs its maker nothing
            raw = b"" if large else file.read(limit + 1)
        except OSError as error:
            raise CorruptError(f"{where}: cannot be read ({error.strerror})") from None
    if large or len(raw) > limit:
        raise CorruptError(f"{where}: larger than {limit:,} bytes")
    return raw


def cannot_write(path: Path, error: OSError, needed: int = 0) -> FileError:
    """The message for a write that failed; `needed` is in bytes."""
    reason = _SAID.get(error.errno or 0, error.strerror or str(error))
    size = f" of {needed:,} bytes" if needed else ""
    return FileError(f"{path}: a write{size} failed: {reason}. What was there before is untouched.")


def make_folder(path: Path) -> None:
    """Creates a folder and its parents, durably; `FileError` when that is impossible."""
    if path.is_dir():
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path}: this folder cannot be made ({error.strerror})") from None
    sync_folder(path.parent)


def sync_files(folder: Path) -> None:
    """Makes what the files in a folder and in those within hold durable; a disk that is full may
    say so here only."""
    for path in folder.iterdir():
        if path.is_dir():
            sync_files(path)
            sync_folder(path)
            continue
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable; file systems that know no such thing are left alone."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _locked(root: Path, label: str) -> tuple[Path, int]:
    """A new folder and its lock; tried again when another writer swept it away before the lock."""
    for _ in range(100):
        path = root / f"{_TMP}{label}-{_machine()}-{_boot()}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            path.mkdir()
        except OSError as error:
            raise cannot_write(path, error) from error
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.stat(path).st_ino == os.fstat(lock).st_ino:
                    return path, lock
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return path, lock
            os.close(lock)
    raise FileError(f"{root}: no temporary folder could be kept there")


def _waited_for(path: Path) -> int:
    """A file that is locked, and still there when it is."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.samestat(os.stat(path), os.fstat(lock)):
                return lock
        except FileNotFoundError:
            pass
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in _NO_LOCKS:
                return lock
            os.close(lock)
            raise
        os.close(lock)


@functools.cache
def _machine() -> str:
    """Eight digits that a machine keeps when it starts anew: of its id and its name, since clones
    of one image may share the id, and others a name. Where one is unknown, those of the boot."""
    known, name = "", platform.node()
    with suppress(OSError, ValueError):
        known = Path("/etc/machine-id").read_text("ascii").strip()
    if len(known) != 32 or not name or name.startswith("localhost"):
        return _boot()
    return _digits(f"{known} {name}")


@functools.cache
def _boot() -> str:
    """Eight digits of the running system, which knows all locks that its processes hold."""
    try:  # the containers of a machine have names of their own, and share this and their locks
        known = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
    except OSError:
        known = platform.node()
    return _digits(known)


def _digits(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _swept(path: Path) -> bool:
    """Removes a folder that no living writer holds; whether it did.

    The lock is held until it is gone: a writer that made the folder just now, and has no lock yet,
    finds it taken and makes another one.
    """
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS or not _quiet(path, _STALE_SECONDS):
            os.close(lock)
            return False
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
    return True


def _quiet(path: Path, least: float) -> bool:
    """Whether for `least` seconds nothing was written to a folder, or to a file in it."""
    try:
        last = max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
    except OSError:
        return False
    return time.time() - last > least


def _exchange(made: Path, target: Path) -> None:
    """Swaps two folders in one step where the system can (renameat2), else in two."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if call and call(here, os.fsencode(made), here, os.fsencode(target), exchange) == 0:
        return
    hidden = target.with_name(f"{_TMP}gone-{target.name}-{secrets.token_hex(4)}")
    os.rename(target, hidden)
    os.rename(made, target)
    shutil.rmtree(hidden, ignore_errors=True)
