"""Generations: numbered folders of tensors and documents, written atomically, read verified.

`ROOT/step-00000010/` holds `manifest.json` and the tensor files it describes. It appears by one
rename once everything in it is durable, so a crash at any moment leaves the earlier generations and
nothing half written. Reading checks every byte that is used against the manifest's digests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from lezero.core.errors import CapacityError, CorruptError, FileError
from lezero.files import folder, sealed
from lezero.files.manifest import NAME, FileEntry, Manifest, TensorEntry
from lezero.files.tensorfile import (
    CHUNK,
    CODES,
    DTYPES,
    Written,
    check_tensor,
    empty_bytes,
    in_order,
    nbytes,
    read_digested,
    write_tensors,
)

FILE_BYTES = 4 << 30
"""A tensor file is closed when the next tensor would make it longer than this."""

_STEP = re.compile(r"step-(\d{8,18})")
_INLINE = 4 << 20  # less than this is read without threads


@dataclass(frozen=True)
class Generation:
    """A generation as read: every tensor is on the CPU and has passed its digests."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    documents: dict[str, Any]
    created: str
    writer: str


def step_path(root: Path, step: int) -> Path:
    """The folder of generation `step`."""
    return Path(root) / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a generation folder's name; None for any other name."""
    match = _STEP.fullmatch(Path(path).name)
    return int(match[1]) if match else None


def list_generations(root: Path) -> list[Path]:
    """The generations in `root`, newest last. They are complete, but not verified yet."""
    try:
        entries = list(os.scandir(root))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise FileError(f"{root}: cannot be listed ({error.strerror})") from None
    found = [
        (step, Path(entry.path))
        for entry in entries
        if (step := step_of(Path(entry.name))) is not None and entry.is_dir(follow_symlinks=False)
    ]
    return [path for _, path in sorted(found)]


def write_generation(
    root: Path,
    step: int,
    *,
    tensors: Mapping[str, Tensor],
    documents: Mapping[str, Any],
) -> Path:
    """Writes generation `step` under `root` and returns its folder once it is durable.

    `tensors` may lie on any device; names that share memory exactly are stored once and come back
    sharing. `documents` are JSON values. A generation of the same step is replaced. Raises
    `FileError` for what cannot be stored and when the disk is full; earlier generations then stand.
    """
    root = Path(root)
    if type(step) is not int or not 0 <= step < 10**18:
        raise FileError(f"step {step!r}: allowed is an integer from 0")
    plain, same = split_shared({n: check_tensor(n, t) for n, t in tensors.items()})
    needed = sum(map(nbytes, plain.values()))
    target = step_path(root, step)
    try:
        with folder.aside(root, target.name) as made:
            _check_space(root, needed)
            files: dict[str, FileEntry] = {}
            entries = {n: TensorEntry("same", same_as=to) for n, to in same.items()}
            for index, names in enumerate(_by_file(plain)):
                file = f"tensors-{index:05d}.safetensors"
                group = {name: plain[name] for name in names}
                written = _write_durable(made / file, group)
                files[file] = FileEntry(written.size, written.header, written.header_digest)
                entries |= _entries(file, group, written)
            created = datetime.now(UTC).isoformat(timespec="seconds")
            writer = f"lezero {_version()}"
            ordered = {name: entries[name] for name in tensors}
            manifest = Manifest(step, created, writer, CHUNK, files, ordered, documents)
            folder.write_durable(made / NAME, manifest.to_bytes())
            folder.commit(made, target)
    except OSError as error:
        raise folder.cannot_write(target, error, needed) from error
    return target


def read_generation(
    path: Path, *, select: Callable[[str], bool] | None = None, threads: int | None = None
) -> Generation:
    """Reads and verifies a generation; `select` keeps only the tensors it says yes to.

    Raises `CorruptError`, naming file and tensor, at the first byte that is not what was written;
    `FileError` when the folder is missing or of another format; `CapacityError` when it does not
    fit in memory.
    """
    path = Path(path)
    with ExitStack() as stack:
        at = _open_folder(path, stack)
        raw = folder.read_small(NAME, f"{path / NAME}", sealed.LIMIT, at)
        manifest = Manifest.from_bytes(raw, f"{path / NAME}", _version())
        named = step_of(path)
        if named is not None and named != manifest.step:
            raise CorruptError(f"{path / NAME}: belongs to step {manifest.step}, not to {named}")
        wanted = [n for n in manifest.tensors if select is None or select(n)]
        plain = {manifest.tensors[n].same_as or n: None for n in wanted}
        opened = _open_files(path, at, manifest, list(plain), stack)
        read = _read_all(path, manifest, list(plain), opened, threads or _threads())
    return Generation(
        path=path,
        step=manifest.step,
        tensors={n: read[manifest.tensors[n].same_as or n] for n in wanted},
        documents=dict(manifest.documents),
        created=manifest.created,
        writer=manifest.writer,
    )


def read_documents(path: Path) -> dict[str, Any]:
    """The documents of a generation, verified, without reading its tensors."""
    return read_generation(path, select=lambda name: False).documents


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes one plain safetensors file, whole or not at all, for programs other than LeZero."""
    path = Path(path)
    checked = {name: check_tensor(name, tensor) for name, tensor in tensors.items()}
    needed = sum(map(nbytes, checked.values()))
    try:
        with folder.aside(path.absolute().parent, path.name) as made:
            _write_durable(made / path.name, checked)
            os.replace(made / path.name, path)
            folder.sync_folder(path.absolute().parent)
    except OSError as error:
        raise folder.cannot_write(path, error, needed) from error


def split_shared(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors that own their values, and for each other name the one it shares memory with."""
    plain: dict[str, Tensor] = {}
    same: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        key = (*view, tensor.is_conj(), tensor.is_neg())
        if tensor.numel() and key in first:
            same[name] = first[key]
        else:
            first[key] = name
            plain[name] = tensor
    return plain, same


def _version() -> str:
    from lezero import __version__

    return __version__


def _threads() -> int:
    return min(8, len(os.sched_getaffinity(0)))


def _check_space(root: Path, needed: int) -> None:
    """Tells of a full disk before other programs run into it, where the system knows."""
    room = os.statvfs(root)
    free = room.f_bavail * room.f_frsize
    if room.f_blocks and free < needed:
        raise FileError(
            f"{root}: the disk is full: {needed:,} bytes to write, {free:,} free. "
            "Earlier generations are untouched."
        )


def _by_file(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    groups: list[list[str]] = []
    size = 0
    for name in in_order(tensors):
        if not groups or size + nbytes(tensors[name]) > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes(tensors[name])
    return groups


def _write_durable(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        written = write_tensors(descriptor, tensors)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return written


def _entries(file: str, group: Mapping[str, Tensor], written: Written) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(
            kind="plain",
            dtype=CODES[tensor.dtype],
            shape=tuple(tensor.shape),
            file=file,
            begin=written.begins[name],
            chunks=tuple(written.chunks[name]),
        )
        for name, tensor in group.items()
    }


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
    path: Path, at: int, manifest: Manifest, wanted: list[str], stack: ExitStack
) -> dict[str, int]:
    """Opens every file needed and checks its size and header, before any tensor is read."""
    needed = {manifest.tensors[name].file for name in wanted}
    opened: dict[str, int] = {}
    for file in sorted(needed):
        entry = manifest.files[file]
        holds = sorted(n for n, e in manifest.tensors.items() if e.file == file)
        others = f" and {len(holds) - 1} more" if len(holds) > 1 else ""
        where = f"{path / file} (holds tensor '{holds[0]}'{others})"
        opened[file] = folder.open_regular(file, where, at)
        stack.callback(os.close, opened[file])
        found = os.fstat(opened[file]).st_size
        if found != entry.size:
            raise _wrong_size(path / file, manifest, file, found)
        target = memoryview(bytearray(entry.header))
        if read_digested(opened[file], 0, target) != entry.digest:
            raise CorruptError(f"{where}: its header is not what was written")
    return opened


def _wrong_size(path: Path, manifest: Manifest, file: str, found: int) -> CorruptError:
    expected = manifest.files[file].size
    said = f"{path}: {found:,} bytes long, {expected:,} were written"
    if found > expected:
        return CorruptError(f"{said}; it was changed afterwards")
    cut = sorted(
        (entry.begin, name)
        for name, entry in manifest.tensors.items()
        if entry.file == file and entry.begin + entry.nbytes > found
    )
    return CorruptError(f"{said}; tensor '{cut[0][1]}' and all after it are cut off")


def _read_all(
    path: Path, manifest: Manifest, wanted: list[str], opened: Mapping[str, int], threads: int
) -> dict[str, Tensor]:
    flats: dict[str, Tensor] = {}
    jobs: list[tuple[str, int, memoryview]] = []
    for name in wanted:
        size = manifest.tensors[name].nbytes
        try:
            flats[name], data = empty_bytes(size)
        except (RuntimeError, MemoryError, OSError, OverflowError):
            raise CapacityError(
                f"{path}: tensor '{name}' of {size:,} bytes does not fit in memory"
            ) from None
        for index, begin in enumerate(range(0, size, manifest.chunk)):
            jobs.append((name, index, data[begin : begin + manifest.chunk]))

    def check(job: tuple[str, int, memoryview]) -> None:
        name, index, target = job
        entry = manifest.tensors[name]
        begin = entry.begin + index * manifest.chunk
        where = f"{path / entry.file}: tensor '{name}'"
        try:
            found = read_digested(opened[entry.file], begin, target)
        except OSError as error:
            raise CorruptError(f"{where} cannot be read ({error.strerror})") from None
        if found != entry.chunks[index]:
            raise CorruptError(
                f"{where} is damaged between bytes {begin:,} and {begin + len(target):,} of the "
                f"file (chunk {index + 1} of {len(entry.chunks)})"
            )

    if threads <= 1 or sum(len(job[2]) for job in jobs) < _INLINE:
        for job in jobs:
            check(job)
    else:
        _in_threads(check, jobs, threads)
    return {
        name: flat.view(DTYPES[manifest.tensors[name].dtype]).view(manifest.tensors[name].shape)
        for name, flat in flats.items()
    }


def _in_threads(check: Callable[[Any], None], jobs: list[Any], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        waiting: list[Future[None]] = [pool.submit(check, job) for job in jobs]
        try:
            for future in waiting:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that `tensors` take on disk, memory shared under two names counted once."""
    return sum(map(nbytes, split_shared(tensors)[0].values()))
