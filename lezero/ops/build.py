"""Builds a native library on first use, with the compilers of this machine, and keeps it.

    sources = [Source(folder / "kernel.c", ("-mavx512f",)), Source(folder / "registration.cpp")]
    path = build("attention", sources)
    torch.ops.load_library(path)

[Note: one build for all]
The library lies in the cache folder under a digest of its sources, the headers beside them, the
flags, the compilers and torch. It is written aside and renamed, so that a reader never sees half of
it; a lock lets one process build while the others of the machine wait and then find it. A file
beside it says what it was made from and what it holds: one that a power cut has cut off is built
again, and where the compilers have gone since, as images for running do, or no longer start, it
still serves. Nothing is built at import.

[Note: whose libraries are loaded]
A library is code, so only what nobody but this user and root can have written is loaded. A folder
of another user is refused, and so is one that others may write to, unless it is sticky as /tmp is:
there they can add files, but not replace ours. A folder of our own is closed to others instead of
refused, since where users have a group of their own (umask 002) all older ones are open to that
group. Others may have written before that: a file that another user owns or may write to counts as
not there, and is built again. Libraries that are made here are not open to others, whatever the
umask is; they may read them, as an image whose root built for its users needs. Folders above this
one are not looked at: whoever may rename what lies in them can put another folder in its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from lezero.core.errors import LeZeroError
from lezero.core.facts import cache_folder
from lezero.core.log import logger

TORCH_TARGET = 0x020B000000000000  # 2.11: the oldest torch whose stable ABI is used
_COMMON = ("-O3", "-fPIC", "-fno-strict-aliasing")
_CPP = ("-std=c++20", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}ULL")
_SECONDS = 300
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_INCLUDED = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class BuildError(LeZeroError):
    """A native library could not be built or kept; the message says why."""


@dataclass(frozen=True)
class Source:
    """One file, C or (`.cpp`) C++, and the flags that only it needs."""

    path: Path
    flags: tuple[str, ...] = ()

    @property
    def is_cpp(self) -> bool:
        return self.path.suffix == ".cpp"


def compilers() -> tuple[str, str]:
    """The paths of a C and a C++ compiler; `BuildError` where one is missing."""
    found = []
    for language, names in (("C", ("cc", "gcc", "clang")), ("C++", ("c++", "g++", "clang++"))):
        path = next(filter(None, map(shutil.which, names)), None)
        if path is None:
            raise BuildError(f"no {language} compiler found (looked for {', '.join(names)})")
        found.append(path)
    return found[0], found[1]


def build(name: str, sources: Sequence[Source], folder: Path | None = None) -> Path:
    """The shared library of `sources`, built now if it is not in `folder` (default: the cache).

    C++ files see torch's headers (stable ABI only) and the library is linked with torch. Raises
    `BuildError` without a compiler that starts (where none was built before), with a compiler's own
    first error, for a source that cannot be read, or for a folder that cannot be written or that
    others own or may write to.
    """
    folder = folder or cache_folder() / "native"
    try:
        made_from = _digest(sources)
    except OSError as error:
        raise BuildError(f"cannot read the sources of {name} ({_said(error)})") from None
    starts = False
    try:
        try:
            tools = compilers()
            key = _named(made_from, tools)
            starts = True
            return _built(name, sources, tools, made_from, folder / f"{name}-{key}.so")
        except (BuildError, OSError) as error:  # no compiler that works, or a folder only to read
            path = _built_before(name, made_from, folder)
            if path is None:
                raise
            if starts and isinstance(error, BuildError):
                logger("ops").warning("%s; what was built before, of the same, serves", error)
            return path
    except OSError as error:
        raise BuildError(f"cannot keep the library {name} in {folder} ({_said(error)})") from None


def kept(name: str, made_from: str, make: Callable[[], bytes]) -> bytes:
    """What `make` gives, from the cache where it was made before, by this process or another."""
    folder = cache_folder() / "native"
    path = folder / f"{name}-{_hash(made_from.encode())[:16]}.bin"
    try:
        _make(folder)
        if _origin(path) == made_from:
            return path.read_bytes()
    except (OSError, BuildError) as error:
        logger("ops").warning("%s is built in each process: %s", name, error)
        return make()
    made = make()
    try:
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            (Path(aside) / path.name).write_bytes(made)
            _keep(Path(aside) / path.name, path, made_from)
    except OSError as error:
        logger("ops").warning("%s is not kept for the next process: %s", name, error)
    return made


def _built(
    name: str, sources: Sequence[Source], tools: tuple[str, str], made_from: str, path: Path
) -> Path:
    """The library of these sources by these compilers."""
    _make(path.parent)
    if _origin(path) != made_from:
        with _lock(path.parent / f"{name}.lock"):
            if _origin(path) != made_from:
                _build(name, sources, tools, path, made_from)
    return path


def _built_before(name: str, made_from: str, folder: Path) -> Path | None:
    """The library of these sources by any compiler."""
    if not folder.is_dir():
        return None
    _refuse_strangers(folder)
    paths = sorted(folder.glob(f"{name}-*.so"))
    return next((path for path in paths if _origin(path) == made_from), None)


def _build(
    name: str, sources: Sequence[Source], tools: tuple[str, str], path: Path, made_from: str
) -> None:
    logger("ops").info("building %s for this machine, once", name)
    aside = path.parent / f"{name}.building"
    _clear(aside)  # of a process that was killed in it
    aside.mkdir(0o700)
    try:
        _keep(_compile(sources, tools, aside), path, made_from)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _keep(built: Path, path: Path, made_from: str) -> None:
    note = built.with_suffix(".json")
    note.write_text(json.dumps({"sources": made_from, "sha256": _hash(built.read_bytes())}))
    for file, place in ((note, path.with_suffix(".json")), (built, path)):
        file.chmod(stat.S_IMODE(file.stat().st_mode) & ~_OTHERS_WRITE)
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())
        if place.is_dir():  # a file is replaced, a folder is not
            _clear(place)
        os.replace(file, place)


def _clear(path: Path) -> None:
    """Removes it, whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _origin(path: Path) -> str:
    """The digest of what a library was made from; "" unless it is there, as it was built here."""
    beside = path.with_suffix(".json")
    try:
        for file in (beside, path):
            if not _written_by_us(file):
                logger("ops").info("%s is not taken: other users may have written it", file)
                return ""
        note = json.loads(beside.read_bytes())
        return str(note["sources"]) if note["sha256"] == _hash(path.read_bytes()) else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _named(made_from: str, tools: Sequence[str]) -> str:
    parts = [made_from]
    for tool in tools:
        parts += [tool, _run([tool, "--version"]).partition("\n")[0]]
    return _hash("\0".join(parts).encode())[:16]


def _digest(sources: Sequence[Source]) -> str:
    digest = hashlib.sha256()
    parts = [torch.__version__, platform.machine(), sys.platform, *_COMMON, *_CPP]
    for source in sources:
        parts += [source.path.name, *source.flags]
    for part in parts:
        digest.update(part.encode() + b"\0")
    for path in _read([source.path.resolve() for source in sources]):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _read(paths: list[Path]) -> list[Path]:
    """These files, and what they and others of ours include."""
    found = list(dict.fromkeys(paths))
    for path in found:  # which grows meanwhile
        for name in _INCLUDED.findall(path.read_text("utf-8", "replace")):
            header = (path.parent / name).resolve()
            if header.is_file() and header not in found:
                found.append(header)
    return found


def _compile(sources: Sequence[Source], tools: tuple[str, str], aside: Path) -> Path:
    with ThreadPoolExecutor(len(sources)) as pool:
        objects = list(pool.map(lambda source: _object(source, tools, aside), sources))
    built = aside / "built.so"
    torch_libraries = ("-L", str(_torch() / "lib"), "-ltorch_cpu", "-ltorch", "-lc10", "-lm")
    _write([tools[1], "-shared", "-o", str(built), *objects, *torch_libraries], str(built))
    return built


def _object(source: Source, tools: tuple[str, str], aside: Path) -> str:
    """One compiled file; C is kept in the cache, since other libraries are made of it too, which
    wait where it is being compiled."""
    made_from = _digest([source])
    path = aside.parent / f"object-{source.path.stem}-{_named(made_from, tools)}.o"
    made = aside / path.name
    end = ("-c", str(source.path), "-o", str(made))
    if source.is_cpp:
        include = ("-I", str(_torch() / "include"))
        _write([tools[1], *_COMMON, *_CPP, *include, *source.flags, *end], str(made))
        return str(made)
    with _lock(path.with_suffix(".lock")):
        if _origin(path) != made_from:
            _write([tools[0], *_COMMON, *source.flags, *end], str(made))
            _keep(made, path, made_from)
    return str(path)


def _torch() -> Path:
    return Path(torch.__file__).parent


def _write(command: list[str], out: str) -> None:
    _run(command)
    if not os.path.isfile(out):
        raise BuildError(f"{command[0]} ended without an error, but wrote no {Path(out).name}")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} was not done after {_SECONDS} s") from None
    except OSError as error:  # not a program, or one of another machine
        raise BuildError(f"{command[0]} cannot be started ({error.strerror or error})") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        first = next((line for line in lines if "error:" in line), lines[-1])
        raise BuildError(f"{command[0]} ended with status {done.returncode}: {first.strip()[:300]}")
    return done.stdout


def _said(error: OSError) -> str:
    place = error.filename2 or error.filename
    return f"{error.strerror}: {place}" if error.strerror and place else str(error)


def _make(folder: Path) -> None:
    """The folder and those above it, where they are missing; one that is there is checked."""
    missing = [one for one in (folder, *folder.parents) if not one.is_dir()]
    for one in reversed(missing):
        one.mkdir(0o755, exist_ok=True)
    _refuse_strangers(folder)


def _refuse_strangers(folder: Path) -> None:
    """Raises `BuildError` where others may write. See [Note: whose libraries are loaded]."""
    if not hasattr(os, "getuid"):
        return
    found = folder.stat()
    if found.st_uid not in (0, os.getuid()):
        raise BuildError(f"{folder} belongs to another user (id {found.st_uid}); set LEZERO_CACHE")
    if _is_open(found) and found.st_uid == os.getuid():
        with suppress(OSError):  # of a disk that is only read; told below
            folder.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)
        found = folder.stat()
    if _is_open(found):
        raise BuildError(
            f"{folder} can be written by other users (mode {stat.S_IMODE(found.st_mode):04o}), who "
            "could put their code there; chmod go-w it, or set LEZERO_CACHE to a folder of your own"
        )


def _is_open(found: os.stat_result) -> bool:
    return bool(found.st_mode & _OTHERS_WRITE) and not found.st_mode & stat.S_ISVTX


def _written_by_us(path: Path) -> bool:
    """Whether nobody but this user and root can have written this file."""
    found = path.lstat()  # a link leads wherever its owner likes
    if not hasattr(os, "getuid"):
        return stat.S_ISREG(found.st_mode)
    ours = found.st_uid in (0, os.getuid()) and not found.st_mode & _OTHERS_WRITE
    return ours and stat.S_ISREG(found.st_mode)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process of the machine at a time; given back by the kernel if it dies."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:  # closing would leave it with a process that was forked meanwhile
            fcntl.flock(file, fcntl.LOCK_UN)
