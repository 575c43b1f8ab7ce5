"""Tokens rounded to int8 on an accelerator: one launch, one Triton program a token.

The result is that of `quantize_tokens`, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lezero.ops.quantize.tokens import INT8_LEVELS

_AT_ONCE = 16384  # inputs of a token that wait in registers for its scale


@triton.jit
def _sizes(values):  # type: ignore[no-untyped-def]
    """Magnitudes; infinity for what is not finite, since a maximum may lose a NaN."""
    return tl.where(tl.abs(values) < float("inf"), tl.abs(values), float("inf"))


@triton.jit
def _codes(values, finite, inverse, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    scaled = tl.where(finite, values * inverse, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -LEVELS), LEVELS)
    # 1.5 · 2^23: a sum with it has no place for fractions, and is rounded half to even.
    return ((scaled + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _round(  # type: ignore[no-untyped-def]
    x,
    given,
    codes,
    scale,
    K,
    columns,
    GIVEN: tl.constexpr,
    LEVELS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * K
    codes += row * columns
    k = tl.arange(0, AT_ONCE)
    first = tl.load(x + k, k < K, 0.0).to(tl.float32)
    sizes = _sizes(first)
    for part in tl.static_range(1, PARTS):
        at = part * AT_ONCE + k
        sizes = tl.maximum(sizes, _sizes(tl.load(x + at, at < K, 0.0).to(tl.float32)))
    most = tl.max(sizes, 0)
    finite = most < float("inf")
    least = 1.1754943508222875e-38  # 2^-126: below, 1 / step may be infinite
    if GIVEN:
        step = tl.load(given).to(tl.float32)
        kept = finite & (step >= least)
    else:
        step = tl.math.div_rn(most, LEVELS)
        kept = finite & (step >= least)
        step = tl.where(kept, step, 0.0)
    inverse = tl.where(kept, tl.math.div_rn(1.0, tl.where(kept, step, 1.0)), 0.0)
    tl.store(scale + row, tl.where(finite, step, float("nan")))
    tl.store(codes + k, _codes(first, finite, inverse, LEVELS), k < columns)
    for part in tl.static_range(1, PARTS):
        at = part * AT_ONCE + k
        more = tl.load(x + at, at < K, 0.0).to(tl.float32)
        tl.store(codes + at, _codes(more, finite, inverse, LEVELS), at < columns)


def quantize_tokens(x_MK: Tensor, scale: Tensor | None, columns: int) -> tuple[Tensor, Tensor]:
    """int8 codes (M, `columns`), with zeros past K, and fp32 scales (M,). `x_MK` is contiguous."""
    M, K = x_MK.shape
    codes = x_MK.new_empty(M, columns, dtype=torch.int8)
    found = x_MK.new_empty(M, dtype=torch.float32)
    if not M:
        return codes, found
    at_once = min(_AT_ONCE, triton.next_power_of_2(columns))
    launch: Any = _round[(M,)]
    with torch.accelerator.device_index(x_MK.device.index):  # Triton takes the current one
        launch(
            *(x_MK, x_MK if scale is None else scale, codes, found, K, columns),
            GIVEN=scale is not None,
            LEVELS=INT8_LEVELS,
            AT_ONCE=at_once,
            PARTS=triton.cdiv(columns, at_once),
            num_warps=min(16, max(1, at_once // 512)),  # 16 values a thread, 32 of the longest
        )
    return codes, found
