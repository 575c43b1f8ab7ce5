"""Weights in rows (`rows.py`) decoded on an accelerator by Triton: all of one, or looked-up rows.

A program decodes a few outputs of 8 J neighbouring inputs, J at a time, which share a scale: one
read of the codes and one write of the values, both in lines that neighbouring threads share. The
values are those of `reference.py`, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lezero.ops.linear.layout import Packed
from lezero.ops.linear.rows import run_of

_OUTPUTS = 16  # of a program
_WHOLE_ROW = 1 << 20  # as a group: more inputs than there are


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    weight,
    scale,
    zero,
    ids,
    out,
    count,
    N,
    K,
    columns,
    groups,
    group,
    BITS: tl.constexpr,
    J: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_IDS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    at = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    at = at.to(tl.int64)
    wanted = at < count
    n = tl.load(ids + at, wanted, 0) if HAS_IDS else at
    there = wanted & (n >= 0) & (n < N)
    block, j = tl.program_id(1), tl.arange(0, J)
    line = weight + (n * columns)[:, None]
    if BITS == 4:
        words = tl.load(line + (block * J + j)[None, :], there[:, None], 0)
    for i in tl.static_range(8):
        first = (block * 8 + i) * J
        k = first + j
        inside = (k < K)[None, :]
        if BITS == 4:
            code = (words >> 4 * i) & 15
        else:
            code = tl.load(line + k[None, :], there[:, None] & inside, 0).to(tl.int32)
        g = n * groups + tl.minimum(first // group, groups - 1)
        if HAS_ZERO:
            start = tl.load(zero + g, there, 0.0).to(tl.float32)
            wide = (code + (128 if BITS == 8 else 0)).to(tl.float32) - start[:, None]
        else:
            wide = (code - (8 if BITS == 4 else 0)).to(tl.float32)
        wide *= tl.load(scale + g, there, 0.0).to(tl.float32)[:, None]
        if HAS_IDS:
            wide = tl.where(there[:, None], wide, float("nan"))
        to = out + (at * K)[:, None] + k[None, :]
        tl.store(to, wide.to(out.dtype.element_ty), wanted[:, None] & inside)


def dequantize(
    packed: Packed,
    out_features: int,
    in_features: int,
    bits: int,
    group: int,
    dtype: torch.dtype,
) -> Tensor:
    """The (N, K) weight in `dtype`."""
    return _run(None, packed, out_features, in_features, bits, group, dtype)


def embedding(
    ids: Tensor, packed: Packed, in_features: int, bits: int, group: int, dtype: torch.dtype
) -> Tensor:
    """Rows `ids` (flat, int64) of the weight: (len(ids), K), NaN for ids that it does not have."""
    return _run(ids.contiguous(), packed, len(ids), in_features, bits, group, dtype)


def _run(
    ids: Tensor | None,
    packed: Packed,
    count: int,
    in_features: int,
    bits: int,
    group: int,
    dtype: torch.dtype,
) -> Tensor:
    weight, scale, zero = packed
    out = weight.new_empty(count, in_features, dtype=dtype)
    if not count:
        return out
    J, outputs = run_of(group), min(_OUTPUTS, triton.next_power_of_2(count))
    grid = (triton.cdiv(count, outputs), triton.cdiv(in_features, 8 * J))
    launch: Any = _decode[grid]
    with torch.accelerator.device_index(weight.device.index):  # Triton takes the current one
        launch(
            *(weight, scale, scale if zero is None else zero, weight if ids is None else ids, out),
            *(count, len(weight), in_features, weight.shape[1], scale.shape[1]),
            group or _WHOLE_ROW,
            BITS=bits,
            J=J,
            HAS_ZERO=zero is not None,
            HAS_IDS=ids is not None,
            OUTPUTS=outputs,
            num_warps=4 if outputs == _OUTPUTS else 1,
        )
    return out
