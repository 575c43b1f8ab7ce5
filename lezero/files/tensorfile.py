"""Tensors as bytes: the safetensors layout, written in one pass with a digest per chunk.

Source: the safetensors format (8-byte little-endian header length, JSON header padded with spaces,
then the tensors without gaps). LeZero writes it itself so that bytes are digested while they are
written, straight from the tensor's memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lezero.core.errors import FileError
from lezero.core.tensors import flat_bytes

CHUNK = 16 << 20
"""Bytes of a tensor that share one digest."""

_HUGE = 4 << 20
_blocks: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_PIECE = 1 << 20  # small enough that a piece is still in the cache when it is used again

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Written:
    """What is needed to check a tensor file: sizes in bytes, digests as hex SHA-256."""

    size: int
    header: int
    header_digest: str
    begins: dict[str, int]
    chunks: dict[str, list[str]]


def check_tensor(name: str, tensor: object) -> Tensor:
    """The tensor, if its values can be stored as they are; otherwise a `FileError` naming it."""
    if not isinstance(tensor, Tensor):
        raise FileError(f"tensor '{name}': got {type(tensor).__name__}, allowed is a torch tensor")
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        kind = type(tensor).__name__
        raise FileError(f"tensor '{name}': a {kind} cannot be stored; pass the plain tensor in it")
    if tensor.is_meta:
        raise FileError(f"tensor '{name}': is on the meta device, so it has no values to store")
    if tensor.layout is not torch.strided or tensor.dtype not in CODES:
        raise FileError(
            f"tensor '{name}': {tensor.layout} {tensor.dtype} cannot be stored; allowed are dense "
            f"tensors of {', '.join(str(d).removeprefix('torch.') for d in CODES)}"
        )
    return tensor.detach()


def nbytes(tensor: Tensor) -> int:
    """Bytes of the tensor's values, whatever storage lies under it."""
    return tensor.numel() * tensor.element_size()


class Form(NamedTuple):
    """What a stored tensor is like, whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def in_order(tensors: Mapping[str, Tensor] | Mapping[str, Form]) -> list[str]:
    """Names with the widest elements first, so that every tensor in a file is aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def write_tensors(descriptor: int, tensors: Mapping[str, Tensor]) -> Written:
    """Writes one safetensors file to an empty, open file."""
    forms = {name: Form(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return write_forms(descriptor, forms, tensors.__getitem__)


def write_forms(
    descriptor: int, forms: Mapping[str, Form], get: Callable[[str], Tensor]
) -> Written:
    """The same of tensors that `get` brings one at a time; none is kept."""
    names, begins, begin = in_order(forms), {}, 0
    fields: dict[str, object] = {}
    for name in names:
        size = forms[name].nbytes
        fields[name] = {
            "dtype": CODES[forms[name].dtype],
            "shape": list(forms[name].shape),
            "data_offsets": [begin, begin + size],
        }
        begins[name], begin = begin, begin + size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    _write(descriptor, memoryview(header))
    chunks = {}
    for name in names:
        tensor = get(name)
        assert (tensor.dtype, tuple(tensor.shape)) == forms[name], name
        chunks[name] = _write_digested(descriptor, tensor)
    moved = {name: len(header) + at for name, at in begins.items()}
    digest = hashlib.sha256(header).hexdigest()
    return Written(len(header) + begin, len(header), digest, moved, chunks)


def as_bytes(tensor: Tensor) -> memoryview:
    """The values of a contiguous CPU tensor as writable bytes; shares its memory."""
    return memoryview(_numpy(flat_bytes(tensor))).cast("B")


def empty_bytes(size: int) -> tuple[Tensor, memoryview]:
    """Fresh host memory as a uint8 tensor and as bytes; on huge pages where that pays.

    Filling fresh memory in small pages costs more than digesting it (measured: 0.92 against
    1.43 GB/s in one thread, digest included).
    """
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
        _blocks.add(block)
        flat = torch.frombuffer(block, dtype=torch.uint8)
    else:
        flat = torch.empty(size, dtype=torch.uint8, device="cpu")
    return flat, memoryview(_numpy(flat))


def mapped_bytes() -> int:
    """Host memory that this process holds by `empty_bytes` apart from the C heap."""
    return sum(map(len, _blocks))


def read_digested(descriptor: int, begin: int, target: memoryview) -> str | None:
    """Fills `target` from the file; returns the digest of the bytes read, None if they end early.

    The digest is taken of the very memory that is handed out.
    """
    digest, at = hashlib.sha256(), 0
    while at < len(target):
        piece = target[at : at + _PIECE]
        count = os.preadv(descriptor, [piece], begin + at)
        if count == 0:
            return None
        digest.update(piece[:count])
        at += count
    return digest.hexdigest()


def _numpy(flat: Tensor) -> Any:
    return flat.numpy()


def _write_digested(descriptor: int, tensor: Tensor) -> list[str]:
    host = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    data = as_bytes(host) if host.numel() else memoryview(b"")
    digests = []
    for begin in range(0, len(data), CHUNK):
        digest, chunk = hashlib.sha256(), data[begin : begin + CHUNK]
        for at in range(0, len(chunk), _PIECE):
            piece = chunk[at : at + _PIECE]
            digest.update(piece)
            _write(descriptor, piece)
        digests.append(digest.hexdigest())
    return digests


def _write(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]
