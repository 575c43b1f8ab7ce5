"""Codecs by hand: tensors into bytes and back.

payload = lz.comm.compress(gradients, codec="int4")
payload.nbytes, payload.ratio
gradients = lz.comm.decompress(payload)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lezero.comm.codec import FLOATS, Codec
from lezero.comm.codec import codec as codec_named
from lezero.core.errors import ConfigError

Tensors = Tensor | list[Tensor] | dict[str, Tensor]


@dataclass(frozen=True)
class Part:
    """One tensor: its bytes (uint8), the shape and dtype it had."""

    data: Tensor
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Payload:
    """What `compress` made, in the form it was given: one tensor, a list, or a dict (`keys`)."""

    codec: str
    parts: tuple[Part, ...]
    keys: tuple[str, ...] | None = None
    single: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes that would travel."""
        return sum(part.data.numel() for part in self.parts)

    @property
    def ratio(self) -> float:
        """Bytes of the tensors divided by those of the payload; 1 for nothing at all."""
        plain = sum(part.shape.numel() * part.dtype.itemsize for part in self.parts)
        return plain / self.nbytes if self.nbytes else 1.0


def compress(
    tensors: Tensor | Iterable[Tensor] | Mapping[str, Tensor], codec: str = "int4"
) -> Payload:
    """Encodes a tensor, or a list or dict of them, each on its own: shapes and dtypes are kept.

    fp32, bf16 and fp16 only: `ConfigError` names another tensor by its key or place, and an unknown
    codec. Nothing is differentiated.
    """
    one = codec_named(codec)
    kind = type(tensors).__name__
    if not isinstance(tensors, Tensor) and hasattr(tensors, "__array__"):
        raise ConfigError(f"compress: got {kind}; give torch.from_numpy(array), as float32")
    if not isinstance(tensors, Tensor | Iterable):
        raise ConfigError(f"compress: got {kind}, allowed is a tensor, or a list or dict of them")
    if isinstance(tensors, Tensor):
        return Payload(codec, (_part(tensors, one, "the tensor"),), single=True)
    if isinstance(tensors, Mapping):
        parts = tuple(_part(x, one, f"'{key}'") for key, x in tensors.items())
        return Payload(codec, parts, keys=tuple(tensors))
    return Payload(
        codec, tuple(_part(x, one, f"tensor {place}") for place, x in enumerate(tensors))
    )


def decompress(payload: Payload) -> Tensors:
    """New tensors of the shapes, dtypes, device and form that `compress` was given."""
    if not isinstance(payload, Payload):
        kind = type(payload).__name__
        raise ConfigError(f"decompress: got {kind}, allowed is what compress returned")
    one = codec_named(payload.codec)
    _check_form(payload)
    found = []
    for part in payload.parts:
        numel = part.shape.numel()
        one.check(part.data, numel)  # before memory is taken for what it claims to be
        out = torch.empty(numel, dtype=part.dtype, device=part.data.device)
        one.decode(part.data, out)
        found.append(out.view(part.shape))
    if payload.single:
        return found[0]
    return found if payload.keys is None else dict(zip(payload.keys, found, strict=True))


def _check_form(payload: Payload) -> None:
    """`ConfigError` for what `compress` cannot have made; what is in the bytes is the codec's."""
    count, keys = len(payload.parts), payload.keys
    if payload.single and count != 1:
        raise ConfigError(f"decompress: got {count} parts of a single tensor; it is damaged")
    if keys is not None and len(keys) != count:
        raise ConfigError(f"decompress: got {len(keys)} keys for {count} parts; it is damaged")
    for place, part in enumerate(payload.parts):
        shape, data = part.shape, part.data
        right = isinstance(shape, torch.Size) and min(shape, default=0) >= 0
        if not (right and isinstance(data, Tensor) and part.dtype in FLOATS):
            raise ConfigError(
                f"decompress: part {place} has shape {shape!r}, dtype {part.dtype!r} and data of "
                f"type {type(data).__name__}; allowed is what compress made: a torch.Size, "
                "float32, bfloat16 or float16, and a tensor of bytes"
            )


def _part(x: Tensor, one: Codec, which: str) -> Part:
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ConfigError(
            f"compress: {which} is {str(found).removeprefix('torch.')}; allowed are float32, "
            "bfloat16 and float16 tensors. Send others as they are, or cast them first"
        )
    if x.is_nested:
        raise ConfigError(
            f"compress: {which} is nested; allowed are dense tensors (give a list, x.unbind())"
        )
    if x.layout is not torch.strided or x.is_meta or hasattr(x, "to_local"):
        kind = "a DTensor" if hasattr(x, "to_local") else "on meta" if x.is_meta else "sparse"
        raise ConfigError(
            f"compress: {which} is {kind}; allowed are dense tensors in memory (of a DTensor give "
            "x.to_local(), of a sparse one x.to_dense())"
        )
    flat = x.detach().resolve_neg().contiguous().view(-1)  # codecs read its bytes
    data = torch.empty(one.bytes(flat.numel()), dtype=torch.uint8, device=x.device)
    one.encode(flat, data)
    return Part(data, x.shape, x.dtype)
