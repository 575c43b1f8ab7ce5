"""Linear layers of 4 and 8 bits for few tokens on an accelerator: one Triton program a tile.

A program takes up to 16 tokens and some panels of 16 outputs, goes through the inputs 64 at a time,
turns codes into weights in registers and multiplies in fp32. Activations keep their 16 or 32 bits:
no fixed point as on the CPU, so results are near the reference, not equal. Weights lie as on the
CPU (`layout.py`): neighbouring programs read neighbouring lines. For many tokens tensor cores pay:
`op.py` then dequantizes and multiplies. Needs triton, which torch's builds for accelerators bring.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lezero.ops.linear.layout import Packed, padded_inputs

MOST_TOKENS = 16
"""Where a product with the dequantized weight becomes the better way."""
_PANELS = 2  # of a program: 32 outputs


@triton.jit
def _linear(  # type: ignore[no-untyped-def]
    x,
    weight,
    scale,
    zero,
    bias,
    out,
    M,
    N,
    K,
    panels,
    lines,
    groups,
    group,
    BITS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    PANELS: tl.constexpr,
):
    n = tl.program_id(0) * PANELS * 16 + tl.arange(0, PANELS * 16)
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    panel = tl.minimum(n // 16, panels - 1).to(tl.int64)
    inside = tl.arange(0, 64)
    total = tl.zeros((TOKENS, PANELS * 16), dtype=tl.float32)
    for begin in range(0, K, 64):
        k = begin + inside
        # Where input k of an output lies: its line, and its byte in it.
        if BITS == 8:
            line, half = k // 4, k * 0
        else:
            line, half = k // 8, (k % 8) // 4
        place = (panel * lines)[None, :] * 64 + (line * 64 + k % 4)[:, None] + (n % 16 * 4)[None, :]
        code = tl.load(weight + place).to(tl.int32)
        if BITS == 4:
            code = (code >> (half * 4)[:, None]) & 15
        at = tl.minimum(k // group, groups - 1)
        where = (panel * groups)[None, :] * 16 + at[:, None] * 16 + (n % 16)[None, :]
        wide = code.to(tl.float32)
        if HAS_ZERO:
            wide -= tl.load(zero + where).to(tl.float32)
        else:
            wide -= 128.0 if BITS == 8 else 8.0
        wide *= tl.load(scale + where).to(tl.float32)
        mask = (m < M)[:, None] & (k < K)[None, :]
        tokens = tl.load(x + m.to(tl.int64)[:, None] * K + k[None, :], mask, 0.0).to(tl.float32)
        wide = tl.where((k < K)[:, None], wide, 0.0)
        # Written out: a dot would want 16 tokens, and could round to fewer bits.
        total += tl.sum(tokens[:, :, None] * wide[None, :, :], 1)
    if HAS_BIAS:
        total += tl.load(bias + n, n < N, 0.0).to(tl.float32)[None, :]
    to = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


def linear_int(
    x_MK: Tensor, packed: Packed, bias: Tensor | None, out_features: int, bits: int, group: int
) -> Tensor:
    """(M, N) in x's dtype: x (dequantized weight)ᵀ + bias, summed in fp32. `x_MK` is contiguous."""
    M, K = x_MK.shape
    out = x_MK.new_empty(M, out_features)
    if not M:
        return out
    weight, scale, zero = packed
    tokens = min(MOST_TOKENS, triton.next_power_of_2(M))
    grid = (triton.cdiv(out_features, 16 * _PANELS), triton.cdiv(M, tokens))
    launch: Any = _linear[grid]
    with torch.accelerator.device_index(x_MK.device.index):  # Triton takes the current one
        launch(
            x_MK,
            weight,
            scale,
            scale if zero is None else zero,
            x_MK if bias is None else bias.contiguous(),
            out,
            M,
            out_features,
            K,
            weight.shape[0],
            weight.shape[1],
            scale.shape[1],
            group or padded_inputs(weight, bits),
            BITS=bits,
            HAS_ZERO=zero is not None,
            HAS_BIAS=bias is not None,
            TOKENS=tokens,
            PANELS=_PANELS,
            num_warps=4,
        )
    return out
