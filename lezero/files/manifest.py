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

_FILE_NAME = re.compile(r"tensors-[a-z0-9-]{1,64}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_TENSORS, _MAX_FILES, _MAX_DIMS, _MAX_SIZE = 1 << 20, 1 << 16, 64, 1 << 62

T = TypeVar("T")


@dataclass(frozen=True)
class FileEntry:
    """One tensor file: its size and the digest of its safetensors header, all in bytes."""

    size: int
    header: int
    digest: str


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `kind` "plain" has bytes in a file, "same" is another tensor under this name."""

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    file: str = ""
    begin: int = 0
    chunks: tuple[str, ...] = ()
    same_as: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


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
        """The sealed file. `FileError` when a document is not JSON or the whole is too large."""
        for name, document in self.documents.items():
            sealed.check_json(document, f"document '{name}'")
        body = {
            "readable_from": READABLE_FROM,
            "writer": self.writer,
            "step": self.step,
            "created": self.created,
            "chunk": self.chunk,
            "files": {name: _file_json(entry) for name, entry in self.files.items()},
            "tensors": {name: _tensor_json(entry) for name, entry in self.tensors.items()},
            "documents": self.documents,
        }
        return sealed.seal(FORMAT, body)

    @classmethod
    def from_bytes(cls, raw: bytes, where: str, version: str) -> Manifest:
        """Checks digest, format and every field; `where` names the file in errors."""
        data = _Fields(sealed.unseal(raw, where, FORMAT, version), where)
        chunk = data.count("chunk", 1)
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

    def count(self, key: str, least: int = 0) -> int:
        value = self.take(key, int)
        if not least <= value <= _MAX_SIZE:
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
    parts = data.take("parts", list)
    if len(parts) != 1 or not isinstance(parts[0], dict) or "offset" in parts[0]:
        raise FileError(f"{data.where}: stored in shards, which this version does not read")
    part = _Fields(parts[0], data.where)
    file, begin = part.take("file", str), part.count("begin")
    chunks = tuple(part.digest(item) for item in part.take("chunks", list))
    made = TensorEntry(kind, dtype, tuple(shape), file, begin, chunks)
    if file not in files:
        raise data.bad(f"lies in '{file[:80]}', which is not listed")
    if len(chunks) != -(-made.nbytes // chunk):
        raise data.bad("has the wrong number of digests")
    return made


def _check_links(made: Manifest, where: str) -> None:
    for name, entry in made.tensors.items():
        if entry.kind == "same":
            target = made.tensors.get(entry.same_as)
            if target is None or target.kind != "plain":
                raise CorruptError(f"{where}: tensor '{name[:200]}' is the same as no plain tensor")


def _check_tiling(made: Manifest, where: str) -> None:
    """Headers and tensors must cover every byte of every file once: no byte is left unchecked."""
    ends = {name: entry.header for name, entry in made.files.items()}
    plain = [(e.file, e.begin, e.nbytes, n) for n, e in made.tensors.items() if e.kind == "plain"]
    for file, begin, size, name in sorted(plain):
        if begin != ends[file]:
            raise CorruptError(f"{where}: tensor '{name[:200]}' overlaps or leaves a gap in {file}")
        ends[file] += size
    for file, entry in made.files.items():
        if ends[file] != entry.size:
            raise CorruptError(f"{where}: the tensors do not fill {file}")


def _file_json(entry: FileEntry) -> dict[str, Any]:
    return {
        "size": entry.size,
        "header": entry.header,
        "digest": entry.digest,
        "transforms": [],
    }


def _tensor_json(entry: TensorEntry) -> dict[str, Any]:
    if entry.kind == "same":
        return {"kind": "same", "as": entry.same_as}
    part = {"file": entry.file, "begin": entry.begin, "chunks": list(entry.chunks)}
    return {
        "kind": "plain",
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "parts": [part],
    }
