"""What a GGUF file says about itself: metadata and the table of its tensors.

llama-gguf-split cuts large models into parts, NAME-00001-of-0000N.gguf and so on; the first is
named and has the metadata, the others lie beside it.

Specification: ggml's `docs/gguf.md`, versions 2 and 3. Every length is checked against the file
first, so that a torn or hostile file ends in a clear error.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lezero.core.errors import CorruptError, FileError
from lezero.core.paths import expand_home, open_regular

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9
_MOST_ITEMS = 1 << 16  # keys or tensors in one file
_KEPT_ARRAY = 1 << 10  # longer arrays (vocabularies, merges) are skipped, only their length is kept
_PART = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")


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


@dataclass(frozen=True)
class Part:
    """A mapped file of a model, with the metadata of the first one."""

    path: Path
    data: mmap.mmap
    header: GGUFHeader


def read_gguf_header(path: str | os.PathLike[str], whole: Collection[str] = ()) -> GGUFHeader:
    """Metadata and tensor table of a GGUF file, without reading weights; of a model in parts the
    tensors of all. whole: keys whose arrays are kept, however long."""
    with opened_parts(Path(expand_home(path)), whole) as (first, *rest):
        tensors = [info for part in (first, *rest) for info in part.header.tensors]
        return replace(first.header, tensors=tensors)


@contextmanager
def opened_parts(path: Path, whole: Collection[str] = ()) -> Iterator[list[Part]]:
    """The files of a model, of which `path` is the first: itself alone where it was not split.

    Raises `FileError` for another part than the first, and where one is missing or of another
    model.
    """
    with ExitStack() as maps:
        data = maps.enter_context(Mapped(path))
        first = Part(path, data, _Reader(data, path, whole).header())
        parts = [first]
        for number, name in enumerate(_other_parts(first), 1):
            data = maps.enter_context(Mapped(name))
            header = _Reader(data, name).header()
            _check_part(first, number, name, header)
            parts.append(Part(name, data, replace(header, metadata=first.header.metadata)))
        names = [info.name for part in parts for info in part.header.tensors]
        wanted = first.header.metadata.get("split.tensors.count", len(names))
        if len(parts) > 1 and not len(set(names)) == len(names) == wanted:
            raise FileError(
                f"{path}: its {len(parts)} parts hold {len(set(names))} tensors, not the {wanted} "
                "that were split; copy all parts of one model again"
            )
        yield parts


def _other_parts(first: Part) -> list[Path]:
    path, metadata = first.path, first.header.metadata
    count, number = metadata.get("split.count", 0), metadata.get("split.no", 0)
    if not isinstance(count, int) or count < 2:
        return []
    found = _PART.fullmatch(path.name)
    stem = found[1] if found else path.stem
    names = [f"{stem}-{i:05d}-of-{count:05d}.gguf" for i in range(1, min(count, 100_000) + 1)]
    if number != 0:
        raise FileError(
            f"{path}: is a later one of {count} parts of a model; give the first, {names[0]}"
        )
    if path.name != names[0]:
        raise FileError(
            f"{path}: is the first of {count} parts of a model; call it {names[0]} as before, "
            "beside the others, or join them with llama-gguf-split --merge"
        )
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        raise FileError(
            f"{path}: is the first of {count} parts of a model, and {missing[0]} is not beside it; "
            "copy all of them there"
        )
    return [path.with_name(name) for name in names[1:]]


def _check_part(first: Part, number: int, path: Path, header: GGUFHeader) -> None:
    wanted = {**first.header.metadata, "split.no": number}
    for key in ("split.no", "split.count", "split.tensors.count"):
        if header.metadata.get(key) != wanted.get(key):
            raise FileError(
                f"{path}: {key} is {header.metadata.get(key)}, but {first.path.name} wants "
                f"{wanted.get(key)}; copy all parts of one model again"
            )


class Mapped:
    """A file as read-only bytes; a memory map, so only what is used is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> mmap.mmap:
        try:
            with open_regular(self.path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise FileError(f"{self.path}: no such file") from None
        except FileError:
            raise
        except ValueError:
            raise CorruptError(f"{self.path}: the file is empty") from None
        except OSError as error:
            raise FileError(f"{self.path}: cannot be read ({error})") from None
        return self._map

    def __exit__(self, *_: object) -> None:
        self._map.close()


class _Reader:
    """Walks the header; no length is believed before the file is seen to hold that much."""

    def __init__(self, data: mmap.mmap, path: Path, whole: Collection[str] = ()) -> None:
        self.data, self.path, self.at, self.whole = data, path, 0, whole

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
            most = len(self.data) if key in self.whole else _KEPT_ARRAY
            metadata[key] = self.value(self.scalar("I"), most)
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

    def value(self, kind: int, most: int) -> Any:
        """most: items of an array that is kept."""
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
            return list(struct.unpack(f"<{length}{code}", raw)) if length <= most else length
        if item != _STRING:
            raise self.corrupt(f"an array of unknown type {item}")
        if length > (len(self.data) - self.at) // 8:
            raise self.corrupt(f"an array of {length} strings")
        if length <= most:
            return self.strings(length)
        self.skip_strings(length)
        return length

    def strings(self, count: int) -> list[str]:
        """Without a call for each, as they may be a vocabulary."""
        data, at, end, found = self.data, self.at, len(self.data), []
        for _ in range(count):
            size = int.from_bytes(data[at : at + 8], "little")
            at += 8
            if size > end - at:
                raise self.corrupt("a text that reaches beyond the end")
            found.append(data[at : at + size])
            at += size
        self.at = at
        try:
            return [text.decode("utf-8") for text in found]
        except UnicodeDecodeError:
            raise self.corrupt("text that is not UTF-8") from None

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
