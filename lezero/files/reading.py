"""Reading a generation: every byte that is used is checked against the manifest's digests.

A tensor may lie in parts, one from each rank that wrote, and only some of its rows may be wanted:
then the chunks that hold these rows are read and checked, and no others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lezero.core.errors import CapacityError, ConfigError, CorruptError, FileError, LeZeroError
from lezero.files import folder
from lezero.files.generation import Generation, step_of, version
from lezero.files.manifest import LIMIT, NAME, Manifest, Part
from lezero.files.tensorfile import DTYPES, Form, empty_bytes, read_digested

_TIMES = 10  # that a generation may be replaced as it is read
_INLINE = 4 << 20  # less than this is read without threads

Select = Callable[[str], bool]
Rows = Callable[[str, tuple[int, ...]], tuple[int, int] | None]
"""(name, shape of the whole tensor) → the rows of dim 0 to read, or None for all."""


class _Piece(NamedTuple):
    """Rows `start` … `stop` of a plain tensor."""

    name: str
    start: int
    stop: int


class _Job(NamedTuple):
    """One chunk to read and check. `target` takes the bytes from `skip` of the chunk on."""

    name: str
    part: Part
    number: int
    size: int
    skip: int
    target: memoryview


def read_generation(
    path: Path,
    *,
    select: Select | None = None,
    rows: Rows | None = None,
    threads: int | None = None,
    look: Callable[[Generation], object] | None = None,
) -> Generation:
    """Reads and verifies a generation; `select` keeps only the tensors it says yes to.

    All is of one: where another takes its place meanwhile, that is read, from its beginning. look:
    is called with it before its tensors are read, each time it begins.
    With `rows`, of some tensors only these rows are read. Raises `ConfigError` for rows that are
    not there; `CorruptError`, naming file and tensor, at the first byte that is not what was
    written; `FileError` when the folder is missing or of another format; `CapacityError` when it
    does not fit in memory.
    """
    path = Path(path)
    for left in reversed(range(_TIMES)):
        with ExitStack() as stack:
            at = _open_folder(path, stack)
            try:
                return _read(path, at, select, rows, threads or _threads(), look, stack)
            except LeZeroError:
                if not left or not _replaced(path, at):
                    raise
    raise AssertionError


def _replaced(path: Path, at: int) -> bool:
    """Whether another folder lies there than the one that is open."""
    try:
        return not os.path.samestat(os.stat(path), os.fstat(at))
    except OSError:
        return False


def _read(
    path: Path,
    at: int,
    select: Select | None,
    rows: Rows | None,
    threads: int,
    look: Callable[[Generation], object] | None,
    stack: ExitStack,
) -> Generation:
    manifest = _manifest(path, at)
    known = Generation(
        path=path,
        step=manifest.step,
        tensors={},
        documents=dict(manifest.documents),
        created=manifest.created,
        writer=manifest.writer,
        forms={name: _form(manifest, name) for name in manifest.tensors},
        ties={name: e.same_as for name, e in manifest.tensors.items() if e.same_as},
    )
    if look is not None:
        look(known)
    wanted: dict[str, _Piece] = {}
    for name, entry in manifest.tensors.items():
        if select is None or select(name):
            target = entry.same_as or name
            plain = manifest.tensors[target]
            some = rows(name, plain.shape) if rows is not None else None
            first, last = some or (0, plain.rows)
            if not 0 <= first <= last <= plain.rows:
                raise ConfigError(
                    f"rows: got {first} to {last} of '{name}', allowed are rows from 0 to "
                    f"{plain.rows}, the first before the last"
                )
            wanted[name] = _Piece(target, first, last)
    pieces = list(dict.fromkeys(wanted.values()))
    opened = _open_files(path, at, manifest, pieces, stack)
    read = _read_all(path, manifest, pieces, opened, threads)
    return replace(known, tensors={name: read[piece] for name, piece in wanted.items()})


def read_documents(path: Path) -> dict[str, Any]:
    """The documents of a generation, verified, without reading its tensors."""
    return read_generation(path, select=lambda name: False).documents


def _manifest(path: Path, at: int) -> Manifest:
    raw = folder.read_small(NAME, f"{path / NAME}", LIMIT, at)
    manifest = Manifest.from_bytes(raw, f"{path / NAME}", version())
    named = step_of(path)
    if named is not None and named != manifest.step:
        raise CorruptError(f"{path / NAME}: belongs to step {manifest.step}, not to {named}")
    return manifest


def _form(manifest: Manifest, name: str) -> Form:
    entry = manifest.tensors[name]
    plain = manifest.tensors[entry.same_as or name]
    return Form(DTYPES[plain.dtype], plain.shape)


def _threads() -> int:
    return min(8, len(os.sched_getaffinity(0)))


def _open_folder(path: Path, stack: ExitStack) -> int:
    try:
        at = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise FileError(f"{path}: there is no such generation") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be opened ({error.strerror})") from None
    stack.callback(os.close, at)
    return at


def _open_files(
    path: Path, at: int, manifest: Manifest, pieces: list[_Piece], stack: ExitStack
) -> dict[str, int]:
    """Opens every file needed and checks its size and header, before any tensor is read."""
    needed = {part.file for piece in pieces for part in _parts(manifest, piece)}
    opened: dict[str, int] = {}
    for file in sorted(needed):
        entry = manifest.files[file]
        holds = sorted(
            n for n, e in manifest.tensors.items() if any(p.file == file for p in e.parts)
        )
        others = f" and {len(holds) - 1} more" if len(holds) > 1 else ""
        where = f"{path / file} (holds tensor '{holds[0]}'{others})"
        opened[file] = folder.open_regular(file, where, at)
        stack.callback(os.close, opened[file])
        found = os.fstat(opened[file]).st_size
        if found != entry.size:
            raise _wrong_size(path / file, manifest, file, found)
        target = memoryview(bytearray(entry.header))
        try:
            header = read_digested(opened[file], 0, target)
        except OSError as error:
            raise CorruptError(f"{where}: its header cannot be read ({error.strerror})") from None
        if header != entry.digest:
            raise CorruptError(f"{where}: its header is not what was written")
    return opened


def _parts(manifest: Manifest, piece: _Piece) -> list[Part]:
    """The parts that hold rows of the piece."""
    parts = manifest.tensors[piece.name].parts
    if piece.start == piece.stop:
        return []
    return [part for part in parts if part.start < piece.stop and piece.start < part.stop]


def _wrong_size(path: Path, manifest: Manifest, file: str, found: int) -> CorruptError:
    expected = manifest.files[file].size
    said = f"{path}: {found:,} bytes long, {expected:,} were written"
    if found > expected:
        return CorruptError(f"{said}; it was changed afterwards")
    cut = sorted(
        (part.begin, name)
        for name, entry in manifest.tensors.items()
        for part in entry.parts
        if part.file == file and part.begin + entry.part_bytes(part) > found
    )
    return CorruptError(f"{said}; tensor '{cut[0][1]}' and all after it are cut off")


def _read_all(
    path: Path,
    manifest: Manifest,
    pieces: list[_Piece],
    opened: Mapping[str, int],
    threads: int,
) -> dict[_Piece, Tensor]:
    flats: dict[_Piece, Tensor] = {}
    jobs: list[_Job] = []
    for piece in pieces:
        size = (piece.stop - piece.start) * manifest.tensors[piece.name].row_bytes
        try:
            flats[piece], data = empty_bytes(size)
        except (RuntimeError, MemoryError, OSError, OverflowError):
            raise CapacityError(
                f"{path}: tensor '{piece.name}' of {size:,} bytes does not fit in memory"
            ) from None
        jobs += _jobs(manifest, piece, data)

    def check(job: _Job) -> None:
        _read_chunk(path, manifest, opened, job)

    if threads <= 1 or sum(job.size for job in jobs) < _INLINE:
        for job in jobs:
            check(job)
    else:
        _in_threads(check, jobs, threads)
    made = {}
    for piece, flat in flats.items():
        entry = manifest.tensors[piece.name]
        shape = (piece.stop - piece.start, *entry.shape[1:]) if entry.shape else ()
        made[piece] = flat.view(DTYPES[entry.dtype]).view(shape)
    return made


def _jobs(manifest: Manifest, piece: _Piece, data: memoryview) -> list[_Job]:
    """The chunks that hold the bytes of `piece`, which `data` takes."""
    entry, chunk = manifest.tensors[piece.name], manifest.chunk
    jobs = []
    for part in _parts(manifest, piece):
        first = (max(piece.start, part.start) - part.start) * entry.row_bytes
        last = (min(piece.stop, part.stop) - part.start) * entry.row_bytes
        to = (part.start - piece.start) * entry.row_bytes  # of the part's first byte in `data`
        size = entry.part_bytes(part)
        for index in range(first // chunk, -(-last // chunk)):
            begin, end = index * chunk, min((index + 1) * chunk, size)
            low, high = max(begin, first), min(end, last)
            target = data[to + low : to + high]
            jobs.append(_Job(piece.name, part, index, end - begin, low - begin, target))
    return jobs


def _read_chunk(path: Path, manifest: Manifest, opened: Mapping[str, int], job: _Job) -> None:
    part = job.part
    begin = part.begin + job.number * manifest.chunk
    whole = job.size == len(job.target)
    data = job.target if whole else memoryview(bytearray(job.size))
    where = f"{path / part.file}: tensor '{job.name}'"
    try:
        found = read_digested(opened[part.file], begin, data)
    except OSError as error:
        raise CorruptError(f"{where} cannot be read ({error.strerror})") from None
    if found != part.chunks[job.number]:
        raise CorruptError(
            f"{where} is damaged between bytes {begin:,} and {begin + job.size:,} of the "
            f"file (chunk {job.number + 1} of {len(part.chunks)})"
        )
    if not whole:
        job.target[:] = data[job.skip : job.skip + len(job.target)]


def _in_threads(check: Callable[[Any], None], jobs: list[Any], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        waiting: list[Future[None]] = [pool.submit(check, job) for job in jobs]
        try:
            for future in waiting:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
