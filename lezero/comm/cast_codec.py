"""none, fp16 and bf16: the values in another type, one after the other.

| name | bits an element | decoded within |
|---|---|---|
| `none` | 32 | exactly (fp32) |
| `fp16` | 16 | 1/2048 of the value, or 2⁻²⁵; from 65520 on infinity |
| `bf16` | 16 | 1/256 of the value, or 2⁻¹³⁴ |
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lezero.comm.codec import ERRORS, Codec, check_flat, codecs
from lezero.core.errors import ConfigError

_TYPES = {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_RELATIVE = {"none": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8}
_ABSOLUTE = {"none": 0.0, "fp16": 2.0**-25, "bf16": 2.0**-134}
_PIECE = 1 << 18  # elements worked on at once where there are several passes: they stay in cache


@codecs.register("none")
@codecs.register("fp16")
@codecs.register("bf16")
class CastCodec(Codec):
    """The values in one type, rounded to the nearest."""

    def __init__(self, name: str) -> None:
        self.name, self.dtype = name, _TYPES[name]
        self.unbiased = name == "none"

    @classmethod
    def parse(cls, name: str, option: str) -> CastCodec:
        if option:
            raise ConfigError(f"codec '{name}:{option}': allowed is '{name}', it has no options")
        return cls(name)

    def bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor, payload: Tensor, error: Tensor | None = None) -> None:
        check_flat("values", values)
        check_flat("payload", payload, self.bytes(values.numel()), (torch.uint8,))
        sent = typed(payload, self.dtype)
        if error is None:
            sent.copy_(values)
        else:
            check_flat("error", error, values.numel(), ERRORS)
            _encode_with(error, values, sent)
        if sent.data_ptr() != payload.data_ptr():
            payload.copy_(sent.view(torch.uint8))

    def decode(self, payload: Tensor, out: Tensor, add: bool = False) -> None:
        check_flat("out", out)
        check_flat("payload", payload, self.bytes(out.numel()), (torch.uint8,))
        came = typed(payload, self.dtype)
        if not add:
            out.copy_(came)
            return
        wide = torch.empty(min(_PIECE, len(out)), dtype=torch.float32, device=out.device)
        for to, part in zip(out.split(_PIECE), came.split(_PIECE), strict=True):
            # Adding two types at once takes four times as long as widening one first.
            added = wide[: len(part)].copy_(part)
            to.copy_(added.add_(to)) if to.dtype != torch.float32 else to.add_(added)

    def bound(self, values: Tensor) -> Tensor:
        size = values.double().abs()
        bound = size * _RELATIVE[self.name] + _ABSOLUTE[self.name]
        over = size > torch.finfo(self.dtype).max
        return torch.where(over, torch.inf, bound)


def _encode_with(error: Tensor, values: Tensor, sent: Tensor) -> None:
    total, lost = values.new_empty(2, min(_PIECE, len(values)), dtype=torch.float32)
    parts = (values.split(_PIECE), sent.split(_PIECE), error.split(_PIECE))
    for x, to, e in zip(*parts, strict=True):
        added, missing = total[: len(x)], lost[: len(x)]
        added.copy_(x).add_(e)
        to.copy_(added)
        torch.sub(added, to, out=missing)
        # A finite sum says at a tenth of the cost that all of them are finite.
        if missing.device.type != "cpu" or not math.isfinite(missing.sum().item()):
            missing = torch.where(missing.isfinite(), missing, e.float())
        e.copy_(missing)


def typed(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """`payload` seen as `dtype`; a copy where it does not begin at a multiple of its size."""
    if payload.storage_offset() % dtype.itemsize:
        payload = payload.clone()
    return payload.view(dtype)
