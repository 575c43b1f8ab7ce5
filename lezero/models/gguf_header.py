"""What a GGUF file says about itself: metadata and the table of its tensors.

Specification: ggml's `docs/gguf.md`, versions 2 and 3. Every length is checked against the file
first, so that a torn or hostile file ends in a clear error.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lezero.core.errors import CorruptError, FileError
from lezero.core.paths import expand_home

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9
_MOST_ITEMS = 1 << 16  # keys or tensors in one file
_KEPT_ARRAY = 1 << 10  # longer arrays (vocabularies, merges) are skipped, only their length is kept


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies; `shape` is torch's order (rows first), `kind` ggml's type number."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says about itself. Long arrays stand as their length."""

    metadata: dict[str, Any]
    tensors: list[TensorInfo]
    data_start: int


def read_gguf_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Metadata and tensor table of a GGUF file, without reading weights."""
    file = Path(expand_home(path))
    with Mapped(file) as data:
        return read_header(data, file)


def read_header(data: mmap.mmap, path: Path) -> GGUFHeader:
    """The same of a file that is mapped already; `path` names it in errors."""
    return _Reader(data, path).header()


class Mapped:
    """A file as read-only bytes; a memory map, so only what is used is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> mmap.mmap:
        try:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise FileError(f"{self.path}: no such file") from None
        except ValueError:
            raise CorruptError(f"{self.path}: the file is empty") from None
        except OSError as error:
            raise FileError(f"{self.path}: cannot be read ({error})") from None
        return self._map

    def __exit__(self, *_: object) -> None:
        self._map.close()


class _Reader:
    """Walks the header; no length is believed before the file is seen to hold that much."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def header(self) -> GGUFHeader:
        if self.data[:4] != b"GGUF":
            raise FileError(f"{self.path}: not a GGUF file (it does not begin with 'GGUF')")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise FileError(f"{self.path}: GGUF version {version}; versions 2 and 3 are read")
        tensors, keys = self.count("tensors"), self.count("keys")
        metadata = {}
        for _ in range(keys):
            key = self.string()
            if key in metadata:
                raise self.corrupt(f"the key {key} for the second time")
            metadata[key] = self.value(self.scalar("I"))
        infos: dict[str, TensorInfo] = {}
        for _ in range(tensors):
            info = self.tensor()
            if info.name in infos:
                raise self.corrupt(f"tensor {info.name} for the second time")
            infos[info.name] = info
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self.corrupt(f"alignment {alignment}")
        for info in infos.values():
            if info.offset % alignment:
                raise self.corrupt(
                    f"tensor {info.name} has offset {info.offset}, no multiple of {alignment},"
                )
        start = -(-self.at // alignment) * alignment
        return GGUFHeader(metadata, list(infos.values()), start)

    def corrupt(self, what: str) -> CorruptError:
        return CorruptError(f"{self.path}: damaged GGUF file: {what} at byte {self.at}")

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise self.corrupt(f"{size} bytes are announced where the file ends")
        self.at += size
        return self.data[self.at - size : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, what: str) -> int:
        count = self.scalar("Q")
        if count > _MOST_ITEMS:
            raise self.corrupt(f"{count} {what}")
        return count

    def string(self) -> str:
        try:
            return self.take(self.scalar("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self.corrupt("text that is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.corrupt(f"a value of unknown type {kind}")
        item, length = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            code = _SCALARS[item]
            raw = self.take(length * struct.calcsize("<" + code))
            return list(struct.unpack(f"<{length}{code}", raw)) if length <= _KEPT_ARRAY else length
        if item != _STRING:
            raise self.corrupt(f"an array of unknown type {item}")
        if length > (len(self.data) - self.at) // 8:
            raise self.corrupt(f"an array of {length} strings")
        if length <= _KEPT_ARRAY:
            return [self.string() for _ in range(length)]
        self.skip_strings(length)
        return length

    def skip_strings(self, count: int) -> None:
        """A vocabulary has hundreds of thousands, so without a call for each."""
        data, at, end = self.data, self.at, len(self.data)
        for _ in range(count):
            at += 8 + int.from_bytes(data[at : at + 8], "little")
            if at > end:
                raise self.corrupt("a text that reaches beyond the end")
        self.at = at

    def tensor(self) -> TensorInfo:
        name, dims = self.string(), self.scalar("I")
        if dims > 4:
            raise self.corrupt(f"tensor {name} with {dims} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(dims))[::-1]
        return TensorInfo(name, shape, self.scalar("I"), self.scalar("Q"))
