"""The manifest of a generation: what should be in the folder, byte for byte.

The whole form is described in `docs/file-format.md`. A manifest may come from a stranger with a
right digest, so nothing in it is believed before it has been checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lezero.core.errors import CorruptError, FileError
from lezero.files import sealed
from lezero.files.tensorfile import DTYPES

FORMAT = 1
NAME = "manifest.json"
READABLE_FROM = "0.1.0"
LIMIT = 512 << 20
"""Largest manifest, in bytes: each tensor has about 200 for each rank that writes a part of it. One
made to fill memory takes some 25 times its size when it is parsed."""

_FILE_NAME = re.compile(r"tensors-[a-z0-9-]{1,64}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_TENSORS, _MAX_FILES, _MAX_DIMS, _MAX_SIZE = 1 << 20, 1 << 16, 64, 1 << 62
_MAX_HEADER = 1 << 28  # more than other readers of safetensors take
_MAX_CHUNK = 1 << 30  # a chunk is read whole, to see whether it is damaged

T = TypeVar("T")


@dataclass(frozen=True)
class FileEntry:
    """One tensor file: its size and the digest of its safetensors header, all in bytes."""

    size: int
    header: int
    digest: str


@dataclass(frozen=True)
class Part:
    """Rows `start` … `stop` of a tensor's dim 0, from byte `begin` of a file on.

    A tensor without dims has one row.
    """

    file: str
    begin: int
    chunks: tuple[str, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `kind` "plain" has bytes in files, "same" is another tensor under this name.

    `parts` follow one another and hold every row once.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    same_as: str = ""

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def part_bytes(self, part: Part) -> int:
        return (part.stop - part.start) * self.row_bytes


@dataclass(frozen=True)
class Manifest:
    step: int
    created: str
    writer: str
    chunk: int
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    documents: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The sealed file. `FileError` when a document is not JSON or the whole over `LIMIT`."""
        for name, document in self.documents.items():
            sealed.check_json(document, f"document '{name}'")
        body = {
            "readable_from": READABLE_FROM,
            "writer": self.writer,
            "step": self.step,
            "created": self.created,
            "chunk": self.chunk,
            "files": {name: file_json(entry) for name, entry in self.files.items()},
            "tensors": {name: tensor_json(entry) for name, entry in self.tensors.items()},
            "documents": self.documents,
        }
        return sealed.seal(FORMAT, body, LIMIT)

    @classmethod
    def from_bytes(cls, raw: bytes, where: str, version: str) -> Manifest:
        """Checks digest, format and every field; `where` names the file in errors."""
        return cls.from_fields(sealed.unseal(raw, where, FORMAT, version), where)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], where: str) -> Manifest:
        """Checks every field; raises `CorruptError` for the first that cannot be."""
        data = _Fields(fields, where)
        chunk = data.count("chunk", 1, _MAX_CHUNK)
        files = {n: _file(n, e) for n, e in data.each("files", _MAX_FILES)}
        tensors = {n: _tensor(e, files, chunk) for n, e in data.each("tensors", _MAX_TENSORS)}
        made = cls(
            step=data.count("step"),
            created=data.take("created", str),
            writer=data.take("writer", str),
            chunk=chunk,
            files=files,
            tensors=tensors,
            documents=data.take("documents", dict),
        )
        _check_links(made, where)
        _check_tiling(made, where)
        return made


class _Fields:
    """A JSON object whose fields are taken out checked; `where` names it in errors."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def bad(self, text: str) -> CorruptError:
        return CorruptError(f"{self.where}: {text}")

    def take(self, key: str, kind: type[T]) -> T:
        value = self.data.get(key)
        if type(value) is not kind:
            raise self.bad(f"'{key}' should be {kind.__name__}, found {str(value)[:40]!r}")
        return value

    def count(self, key: str, least: int = 0, most: int = _MAX_SIZE) -> int:
        value = self.take(key, int)
        if not least <= value <= most:
            raise self.bad(f"'{key}' is out of range")
        return value

    def digest(self, value: object) -> str:
        if not isinstance(value, str) or not _DIGEST.fullmatch(value):
            raise self.bad("a digest is not 64 hexadecimal digits")
        return value

    def each(self, key: str, most: int) -> Iterator[tuple[str, _Fields]]:
        group = self.take(key, dict)
        if len(group) > most:
            raise self.bad(f"more than {most:,} {key}")
        for name, item in group.items():
            where = f"{self.where}: {key.removesuffix('s')} '{name[:200]}'"
            if not isinstance(item, dict):
                raise CorruptError(f"{where}: expected a JSON object")
            yield name, _Fields(item, where)


def _file(name: str, data: _Fields) -> FileEntry:
    if not _FILE_NAME.fullmatch(name):
        raise data.bad("not a name of a tensor file; such a name is never opened")
    transforms = data.take("transforms", list)
    if transforms:
        raise FileError(f"{data.where}: stored through {str(transforms)[:80]}, which is unknown")
    size, header = data.count("size"), data.count("header", 8)
    if header > size:
        raise data.bad("its header is longer than the file")
    if header > _MAX_HEADER:
        raise data.bad(f"its header is longer than {_MAX_HEADER:,} bytes")
    return FileEntry(size, header, data.digest(data.data.get("digest")))


def _tensor(data: _Fields, files: Mapping[str, FileEntry], chunk: int) -> TensorEntry:
    kind = data.take("kind", str)
    if kind == "same":
        return TensorEntry(kind, same_as=data.take("as", str))
    if kind != "plain":
        raise FileError(
            f"{data.where}: of kind '{kind[:40]}', which this version does not read; "
            "it reads plain, same"
        )
    dtype, shape = data.take("dtype", str), data.take("shape", list)
    if dtype not in DTYPES:
        raise FileError(f"{data.where}: of dtype '{dtype[:40]}', which this version does not read")
    if len(shape) > _MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
        raise data.bad("its shape is no list of sizes")
    if math.prod(max(n, 1) for n in shape) > _MAX_SIZE // 16:
        raise data.bad("its shape is too large")
    made = TensorEntry(kind, dtype, tuple(shape))
    listed = data.take("parts", list)
    parts = tuple(_part(item, data, made, files, chunk) for item in listed)
    rows = 0
    for part in parts:
        if part.start != rows:
            raise data.bad("its parts overlap, leave rows out or are not in order")
        rows = part.stop
    if not parts or rows != made.rows:
        raise data.bad("its parts do not hold all of its rows")
    return TensorEntry(kind, dtype, made.shape, parts)


def _part(
    item: object, data: _Fields, made: TensorEntry, files: Mapping[str, FileEntry], chunk: int
) -> Part:
    if not isinstance(item, dict):
        raise data.bad("a part of it is no JSON object")
    fields = _Fields(item, data.where)
    file, begin = fields.take("file", str), fields.count("begin")
    chunks = tuple(fields.digest(digest) for digest in fields.take("chunks", list))
    start, stop = 0, made.rows
    if "offset" in item or "shape" in item:
        offset, shape = fields.take("offset", list), fields.take("shape", list)
        if any(type(n) is not int or n < 0 for n in [*offset, *shape]):
            raise data.bad("a part of it lies nowhere")
        inner = list(made.shape[1:])
        if not made.shape or offset[1:] != [0] * len(inner) or shape[1:] != inner:
            raise FileError(
                f"{data.where}: cut otherwise than by rows, which this version does not read"
            )
        start, stop = offset[0], offset[0] + shape[0]
    part = Part(file, begin, chunks, start, stop)
    if file not in files:
        raise data.bad(f"lies in '{file[:80]}', which is not listed")
    if len(chunks) != -(-made.part_bytes(part) // chunk):
        raise data.bad("has the wrong number of digests")
    return part


def _check_links(made: Manifest, where: str) -> None:
    for name, entry in made.tensors.items():
        if entry.kind == "same":
            target = made.tensors.get(entry.same_as)
            if target is None or target.kind != "plain":
                raise CorruptError(f"{where}: tensor '{name[:200]}' is the same as no plain tensor")


def _check_tiling(made: Manifest, where: str) -> None:
    """Headers and tensors must cover every byte of every file once: no byte is left unchecked."""
    ends = {name: entry.header for name, entry in made.files.items()}
    plain = [
        (part.file, part.begin, entry.part_bytes(part), name)
        for name, entry in made.tensors.items()
        for part in entry.parts
    ]
    for file, begin, size, name in sorted(plain):
        if begin != ends[file]:
            raise CorruptError(f"{where}: tensor '{name[:200]}' overlaps or leaves a gap in {file}")
        ends[file] += size
    for file, entry in made.files.items():
        if ends[file] != entry.size:
            raise CorruptError(f"{where}: the tensors do not fill {file}")


def file_json(entry: FileEntry) -> dict[str, Any]:
    return {
        "size": entry.size,
        "header": entry.header,
        "digest": entry.digest,
        "transforms": [],
    }


def tensor_json(entry: TensorEntry) -> dict[str, Any]:
    if entry.kind == "same":
        return {"kind": "same", "as": entry.same_as}
    return {
        "kind": "plain",
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "parts": [_part_json(entry, part) for part in entry.parts],
    }


def _part_json(entry: TensorEntry, part: Part) -> dict[str, Any]:
    made = {"file": part.file, "begin": part.begin, "chunks": list(part.chunks)}
    if (part.start, part.stop) == (0, entry.rows):
        return made
    inner = entry.shape[1:]
    offset, shape = [part.start, *(0 for _ in inner)], [part.stop - part.start, *inner]
    return {**made, "offset": offset, "shape": shape}
