"""Generations: numbered folders of tensors and documents, written atomically, read verified.

`ROOT/step-00000010/` holds `manifest.json` and the tensor files it describes. It appears by one
rename once everything in it is durable, so a crash at any moment leaves the earlier generations and
nothing half written. Several writers may share the work: each writes the rows it has into the same
folder (`write_part`), and one of them commits when all are done (`commit_parts`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lezero.core.errors import FileError
from lezero.files import folder
from lezero.files.manifest import (
    NAME,
    FileEntry,
    Manifest,
    Part,
    TensorEntry,
    file_json,
    tensor_json,
)
from lezero.files.tensorfile import (
    CHUNK,
    CODES,
    Form,
    Written,
    check_tensor,
    in_order,
    nbytes,
    write_forms,
)

FILE_BYTES = 4 << 30
"""A tensor file is closed when the next tensor would make it longer than this."""

_STEP = re.compile(r"step-(\d{8,18})")


class Slice(NamedTuple):
    """A tensor is the rows from `start` on of one of `shape`."""

    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Generation:
    """A generation as read: every tensor is on the CPU and has passed its digests.

    `forms` tells of every tensor that is stored, read or not; `ties` of those that are another one
    under a second name.
    """

    path: Path
    step: int
    tensors: dict[str, Tensor]
    documents: dict[str, Any]
    created: str
    writer: str
    forms: dict[str, Form]
    ties: dict[str, str]


def step_path(root: Path, step: int) -> Path:
    """The folder of generation `step`; `FileError` for what is no step."""
    if type(step) is not int or not 0 <= step < 10**18:
        raise FileError(f"step {step!r}: allowed is an integer from 0")
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
    needed = tensor_bytes({name: check_tensor(name, t) for name, t in tensors.items()})
    target = step_path(root, step)
    try:
        with folder.aside(root, target.name) as made:
            check_space(root, needed)
            part = write_part(made, "", tensors)
            commit_parts(made, target, step, [part], documents)
    except OSError as error:
        raise folder.cannot_write(target, error, needed) from error
    return target


def write_part(
    made: Path,
    label: str,
    tensors: Mapping[str, Tensor],
    slices: Mapping[str, Slice] | None = None,
) -> dict[str, Any]:
    """Writes one writer's tensors into the folder `made`, durably; returns the record of them.

    `slices` says which tensors are rows of larger ones. `label` tells the writer's files from those
    of others. Raises `OSError` for a full disk.
    """
    slices = slices or {}
    plain, same = split_shared({n: check_tensor(n, t) for n, t in tensors.items()})
    files: dict[str, FileEntry] = {}
    entries = {n: TensorEntry("same", same_as=to) for n, to in same.items()}
    for index, names in enumerate(_by_file(plain)):
        file = f"tensors-{label}{index:05d}.safetensors"
        group = {name: plain[name] for name in names}
        shapes = {name: Form(tensor.dtype, tuple(tensor.shape)) for name, tensor in group.items()}
        written = _write_durable(made / file, shapes, group.__getitem__)
        files[file] = FileEntry(written.size, written.header, written.header_digest)
        entries |= _entries(file, group, written, slices)
    return {
        "files": {name: file_json(entry) for name, entry in files.items()},
        "tensors": {name: tensor_json(entries[name]) for name in tensors},
    }


def commit_parts(
    made: Path,
    target: Path,
    step: int,
    parts: Sequence[Mapping[str, Any]],
    documents: Mapping[str, Any],
    spared: Path | None = None,
) -> None:
    """Writes the manifest of what `write_part` gave to every writer, and makes `target` visible.

    `made` lies beside `target`, or within it while that is empty. `spared` is where a generation
    goes that it would replace, which is removed otherwise.
    Raises `CorruptError` when the writers together did not write every row of every tensor once.
    """
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for part in parts:
        files |= part["files"]
        for name, entry in part["tensors"].items():
            there = tensors.setdefault(name, {**entry, "parts": []}) if "parts" in entry else None
            if there is None:
                tensors[name] = entry
            else:
                there["parts"] = sorted(there["parts"] + entry["parts"], key=_first_row)
    fields = {
        "writer": f"lezero {version()}",
        "step": step,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "chunk": CHUNK,
        "files": files,
        "tensors": tensors,
        "documents": dict(documents),
    }
    manifest = Manifest.from_fields(fields, str(target / NAME))
    folder.write_durable(made / NAME, manifest.to_bytes())
    if made.parent == target:
        folder.move_in(made, target, NAME)
    else:
        folder.commit(made, target, spared)


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes one plain safetensors file, whole or not at all, for programs other than LeZero."""
    checked = {name: check_tensor(name, tensor) for name, tensor in tensors.items()}
    forms = {name: Form(tensor.dtype, tuple(tensor.shape)) for name, tensor in checked.items()}
    write_tensor_stream(path, forms, checked.__getitem__)


def write_tensor_stream(
    path: Path, forms: Mapping[str, Form], get: Callable[[str], Tensor]
) -> None:
    """The same of tensors that `get` brings one at a time, in any order; none is kept."""
    path = Path(path)
    needed = sum(form.nbytes for form in forms.values())
    try:
        with folder.aside(path.absolute().parent, path.name) as made:
            _write_durable(made / path.name, forms, get)
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


def version() -> str:
    from lezero import __version__

    return __version__


def check_space(root: Path, needed: int) -> None:
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


def _write_durable(path: Path, forms: Mapping[str, Form], get: Callable[[str], Tensor]) -> Written:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        written = write_forms(descriptor, forms, get)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return written


def _entries(
    file: str, group: Mapping[str, Tensor], written: Written, slices: Mapping[str, Slice]
) -> dict[str, TensorEntry]:
    made = {}
    for name, tensor in group.items():
        shape, start = slices.get(name, Slice(tuple(tensor.shape), 0))
        stop = start + (tensor.shape[0] if shape else 1)
        part = Part(file, written.begins[name], tuple(written.chunks[name]), start, stop)
        made[name] = TensorEntry("plain", CODES[tensor.dtype], shape, (part,))
    return made


def _first_row(part: Mapping[str, Any]) -> int:
    return int(part["offset"][0]) if "offset" in part else 0


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that `tensors` take on disk, memory shared under two names counted once."""
    return sum(map(nbytes, split_shared(tensors)[0].values()))
