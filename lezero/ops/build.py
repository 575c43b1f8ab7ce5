"""Builds a native library on first use, with the compilers of this machine, and keeps it.

    sources = [Source(folder / "kernel.c", ("-mavx512f",)), Source(folder / "registration.cpp")]
    path = build("attention", sources)
    torch.ops.load_library(path)

[Note: one build for all]
The library lies in the cache folder under a digest of its sources, the headers beside them, the
flags, the compilers and torch. It is written aside and renamed, so that a reader never sees half of
it; a lock lets one process build while the others of the machine wait and then find it. A file
beside it says what it was made from and what it holds: one that a power cut has cut off is built
again, and where the compilers have gone since, as images for running do, it still serves. Nothing
is built at import.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
    `BuildError` without a compiler (where none was built before), with a compiler's own first
    error, or for a folder that cannot be written or belongs to another user.
    """
    folder = folder or cache_folder() / "native"
    made_from = _digest(sources)
    try:
        tools = compilers()
    except BuildError:
        path = _built_before(name, made_from, folder)
        if path is None:
            raise
        return path
    path = folder / f"{name}-{_named(made_from, tools)}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_strangers(folder)
        if _origin(path) == made_from:
            return path
        with _lock(folder / f"{name}.lock"):
            if _origin(path) != made_from:
                logger("ops").info("building %s for this machine, once", name)
                aside = folder / f"{name}.building"
                shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed in it
                aside.mkdir()
                try:
                    _keep(_compile(sources, tools, aside), path, made_from)
                finally:
                    shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        why = error.strerror or error
        raise BuildError(f"cannot keep the library {name} in {folder} ({why})") from None
    return path


def kept(name: str, made_from: str, make: Callable[[], bytes]) -> bytes:
    """What `make` gives, from the cache where it was made before, by this process or another."""
    folder = cache_folder() / "native"
    path = folder / f"{name}-{_hash(made_from.encode())[:16]}.bin"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_strangers(folder)
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


def _built_before(name: str, made_from: str, folder: Path) -> Path | None:
    """The library of these sources by any compiler."""
    if not folder.is_dir():
        return None
    _refuse_strangers(folder)
    paths = sorted(folder.glob(f"{name}-*.so"))
    return next((path for path in paths if _origin(path) == made_from), None)


def _keep(built: Path, path: Path, made_from: str) -> None:
    note = built.with_suffix(".json")
    note.write_text(json.dumps({"sources": made_from, "sha256": _hash(built.read_bytes())}))
    for file, place in ((note, path.with_suffix(".json")), (built, path)):
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())
        os.replace(file, place)


def _origin(path: Path) -> str:
    """The digest of what a library was made from; "" unless it is there, as it was built."""
    try:
        note = json.loads(path.with_suffix(".json").read_bytes())
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
        for name in _INCLUDED.findall(path.read_text("utf-8")):
            header = (path.parent / name).resolve()
            if header.is_file() and header not in found:
                found.append(header)
    return found


def _compile(sources: Sequence[Source], tools: tuple[str, str], aside: Path) -> Path:
    home = Path(torch.__file__).parent
    include = ("-I", str(home / "include"))
    commands, objects = [], []
    for number, source in enumerate(sources):
        tool, extra = (tools[1], (*_CPP, *include)) if source.is_cpp else (tools[0], ())
        objects.append(str(aside / f"{number}.o"))
        flags = (*_COMMON, *extra, *source.flags)
        commands.append([tool, *flags, "-c", str(source.path), "-o", objects[-1]])
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(_run, commands))
    built = aside / "built.so"
    torch_libraries = ("-L", str(home / "lib"), "-ltorch_cpu", "-ltorch", "-lc10", "-lm")
    _run([tools[1], "-shared", "-o", str(built), *objects, *torch_libraries])
    return built


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
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        first = next((line for line in lines if "error:" in line), lines[-1])
        raise BuildError(f"{command[0]} ended with status {done.returncode}: {first.strip()[:300]}")
    return done.stdout


def _refuse_strangers(folder: Path) -> None:
    """A library is code: it is not loaded from a folder that another user owns."""
    owner = folder.stat().st_uid
    if hasattr(os, "getuid") and owner not in (0, os.getuid()):
        raise BuildError(f"{folder} belongs to another user (id {owner}); set LEZERO_CACHE")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process of the machine at a time; given back by the kernel if it dies."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
