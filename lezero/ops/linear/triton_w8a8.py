"""W8A8 with a scale a row on an accelerator: one launch on the units for int8.

    out = (t · s) · Σ_k a w + bias

Sums of whole numbers are exact, in any order; they stay in registers until scales and bias have
been applied, each rounded as in `reference.finish`: the reference's result, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOGETHER = 8  # tiles of tokens whose programs follow each other: they find weights in the cache


class _Tile(NamedTuple):
    """What a program multiplies at a time, and how many such loads are under way."""

    tokens: int
    outputs: int
    inputs: int
    stages: int


def _tile(tokens: int) -> _Tile:
    """Few tokens wait for the weight, which many programs read with long loads."""
    if tokens <= 16:
        return _Tile(16, 32, 256, 4)
    return _Tile(64, 64, 128, 4) if tokens <= 128 else _Tile(128, 128, 128, 3)


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    a,
    w,
    token,
    scale,
    bias,
    out,
    M,
    N,
    K,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """EVEN: K is a multiple of INPUTS."""
    program = tl.program_id(0)
    across = TOGETHER * tl.cdiv(N, OUTPUTS)
    first = program // across * TOGETHER
    together = tl.minimum(tl.cdiv(M, TOKENS) - first, TOGETHER)
    m = (first + program % across % together) * TOKENS + tl.arange(0, TOKENS)
    n = program % across // together * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, INPUTS)
    # Past the edges the last row is read again, and not stored: loads need no mask for them.
    from_a = a + tl.minimum(m, M - 1).to(tl.int64)[:, None] * K + k[None, :]
    from_w = w + tl.minimum(n, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros((TOKENS, OUTPUTS), tl.int32)
    for begin in tl.range(0, K, INPUTS):
        if EVEN:
            some_a, some_w = tl.load(from_a), tl.load(from_w)
        else:
            there = begin + k < K
            some_a = tl.load(from_a, there[None, :], 0)
            some_w = tl.load(from_w, there[:, None], 0)
        total = tl.dot(some_a, some_w, total, out_dtype=tl.int32)
        from_a += INPUTS
        from_w += INPUTS
    of_token = tl.load(token + m, m < M, 0.0)
    of_row = tl.load(scale + n, n < N, 0.0).to(tl.float32)
    # Plus 0: from compute capability 10 on, assemblers fuse pairs of products and sums regardless.
    found = tl.fma(total.to(tl.float32), of_token[:, None] * of_row[None, :], 0.0)
    if HAS_BIAS:
        found += tl.load(bias + n, n < N, 0.0).to(tl.float32)[None, :]
    to = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, found.to(out.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


def linear_w8a8(
    a_MK: Tensor,
    token_M: Tensor,
    w_NK: Tensor,
    scale_N1: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """(M, N) in `dtype`, from codes, both int8 and contiguous, and their scales, `token_M` fp32.

    K is a multiple of 16, as in the row layout of `rows.py`.
    """
    (M, K), N = a_MK.shape, len(w_NK)
    out = a_MK.new_empty(M, N, dtype=dtype)
    if not M:
        return out
    tile = _tile(M)
    launch: Any = _multiply[(triton.cdiv(M, tile.tokens) * triton.cdiv(N, tile.outputs),)]
    with torch.accelerator.device_index(out.device.index):  # Triton takes the current one
        launch(
            *(a_MK, w_NK, token_M, scale_N1, token_M if bias is None else bias.contiguous(), out),
            *(M, N, K),
            TOKENS=tile.tokens,
            OUTPUTS=tile.outputs,
            INPUTS=tile.inputs,
            TOGETHER=_TOGETHER,
            EVEN=K % tile.inputs == 0,
            HAS_BIAS=bias is not None,
            num_warps=4,
            num_stages=tile.stages,
            enable_fp_fusion=False,  # the product is rounded before the bias is added
        )
    return out
