"""Tokens rounded to float8 on an accelerator: one launch, one Triton program a token.

The result is that of `fp8_tokens`, bit for bit. A token of up to `_AT_ONCE` inputs is read once and
waits in registers for its scale; what is beyond them is read again, by then from a cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lezero.ops.quantize.tokens import FP8_LEVELS

_AT_ONCE = 16384


@triton.jit
def _sizes(values):  # type: ignore[no-untyped-def]
    """Magnitudes; infinity for what is not finite, since a maximum may lose a NaN."""
    return tl.where(tl.abs(values) < float("inf"), tl.abs(values), float("inf"))


@triton.jit
def _codes(values, finite, inverse):  # type: ignore[no-untyped-def]
    return tl.where(finite, values * inverse, 0.0).to(tl.float8e4nv)


@triton.jit
def _round(  # type: ignore[no-untyped-def]
    x, codes, scale, K, LEVELS: tl.constexpr, AT_ONCE: tl.constexpr, PARTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x += row * K
    codes += row * K
    k = tl.arange(0, AT_ONCE)
    first = tl.load(x + k, k < K, 0.0).to(tl.float32)
    sizes = _sizes(first)
    for part in tl.static_range(1, PARTS):
        at = part * AT_ONCE + k
        more = tl.load(x + at, at < K, 0.0).to(tl.float32)
        sizes = tl.maximum(sizes, _sizes(more))
    most = tl.max(sizes, 0)
    finite = most < float("inf")
    step = tl.math.div_rn(most, LEVELS)
    kept = finite & (step >= 1.1754943508222875e-38)  # 2^-126: below, 1 / step may be infinite
    inverse = tl.where(kept, tl.math.div_rn(1.0, tl.where(kept, step, 1.0)), 0.0)
    tl.store(scale + row, tl.where(kept, step, tl.where(finite, 0.0, float("nan"))))
    tl.store(codes + k, _codes(first, finite, inverse), k < K)
    for part in tl.static_range(1, PARTS):
        at = part * AT_ONCE + k
        more = tl.load(x + at, at < K, 0.0).to(tl.float32)
        tl.store(codes + at, _codes(more, finite, inverse), at < K)


def fp8_tokens(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn codes (M, K) and fp32 scales (M,). `x_MK` is contiguous."""
    M, K = x_MK.shape
    codes = torch.empty_like(x_MK, dtype=torch.float8_e4m3fn)
    scale = x_MK.new_empty(M, dtype=torch.float32)
    if not x_MK.numel():
        return codes, scale.zero_()
    at_once = min(_AT_ONCE, triton.next_power_of_2(K))
    launch: Any = _round[(M,)]
    with torch.accelerator.device_index(x_MK.device.index):  # Triton takes the current one
        launch(
            *(x_MK, codes, scale, K),
            LEVELS=FP8_LEVELS,
            AT_ONCE=at_once,
            PARTS=triton.cdiv(K, at_once),
            num_warps=min(16, max(1, at_once // 512)),  # 16 values a thread, 32 of the longest
        )
    return codes, scale
