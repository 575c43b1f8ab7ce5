"""One token times a weight of 4 bits on an accelerator: no matrix units, which would idle.

    out = norm(x) wᵀ + bias + residual

A program takes BN outputs and a part of the inputs. A code in the place where an fp32 number has
the first bits below its leading one makes that number 128 + c: one shift, one masking. Four
neighbouring products are added before their group's scale multiplies them; what 128 and the zero
points added comes off once a group (Σ x). The programs of a tile of outputs add their parts as
those of `triton_few.py` do, so results do not depend on which ends last.

The norm is a launch of its own: each program would do it again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lezero.core.device import processors
from lezero.ops.linear.layout import Packed
from lezero.ops.linear.rows import run_of
from lezero.ops.triton_units import MOST_COUNTED, counts

_MASKED = tl.constexpr("lop3.b32 $0, $1, 0x000f0000, 0x43000000, 0xea;")


@triton.jit
def _code(word, i: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """128 + code i of each word, in fp32. ASM: masking and setting bits is one instruction."""
    moved = word << (16 - 4 * i) if i < 4 else word >> (4 * i - 16)
    if ASM:
        return tl.inline_asm_elementwise(_MASKED, "=f,r", [moved], tl.float32, True, 1)
    else:
        return ((moved & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True)


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    x, w, scale, index, begin, end, K, words, groups,
    EVEN: tl.constexpr, GROUPED: tl.constexpr, IN_BLOCK: tl.constexpr,
    J: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Σ (128 + c) x, scaled where scales are of groups: (BN,)."""
    j = tl.arange(0, J)
    acc = tl.zeros((BN, J // 4), tl.float32)
    line = w + (index * words)[:, None] + j[None, :]
    for b in tl.range(begin, end, num_stages=STAGES):
        word = tl.load(line + b * J)
        for i in tl.static_range(8):
            k = (b * 8 + i) * J + j
            v = tl.load(x + k).to(tl.float32) if EVEN else tl.load(x + k, k < K, 0.0).to(tl.float32)
            four = tl.sum(tl.reshape(_code(word, i, ASM) * v[None, :], (BN, J // 4, 4)), 2)
            if GROUPED:
                at = b * IN_BLOCK + i * IN_BLOCK // 8
                if not EVEN:
                    at = tl.minimum(at, groups - 1)
                four *= tl.load(scale + index * groups + at).to(tl.float32)[:, None]
            acc += four
    return tl.sum(acc, 1)


@triton.jit
def _offsets(  # type: ignore[no-untyped-def]
    x, scale, zero, index, begin, end, K, groups,
    EVEN: tl.constexpr, GROUPED: tl.constexpr, ZERO: tl.constexpr,
    SHARED: tl.constexpr, J: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Σ (128 + zero) x, scaled as the products: (BN,).

    SHARED: inputs of one scale within a block of 8 J."""
    COUNT: tl.constexpr = 8 * J // SHARED
    g, inside = tl.arange(0, COUNT), tl.arange(0, SHARED)
    off = tl.zeros((BN,), tl.float32)
    for b in range(begin, end):
        k = b * 8 * J + g[:, None] * SHARED + inside[None, :]
        v = tl.load(x + k, k < K, 0.0).to(tl.float32)
        sums = tl.sum(v, 1)
        if GROUPED:
            at = b * COUNT + g
            at = index[:, None] * groups + (at if EVEN else tl.minimum(at, groups - 1))[None, :]
            factor = tl.load(scale + at).to(tl.float32)
            factor *= (128.0 + tl.load(zero + at).to(tl.float32)) if ZERO else 136.0
            off += tl.sum(factor * sums[None, :], 1)
        else:
            one = (128.0 + tl.load(zero + index).to(tl.float32)) if ZERO else 136.0
            off += one * tl.sum(sums, 0)
    return off


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    acc, n, N, bias, residual, out, BIAS: tl.constexpr, RESIDUAL: tl.constexpr
):  # fmt: skip
    if BIAS:
        acc += tl.load(bias + n, n < N, 0.0).to(tl.float32)
    if RESIDUAL:
        acc = acc.to(out.dtype.element_ty).to(tl.float32)
        acc += tl.load(residual + n, n < N, 0.0).to(tl.float32)
    tl.store(out + n, acc.to(out.dtype.element_ty), n < N)


@triton.jit
def _one(  # type: ignore[no-untyped-def]
    x, w, scale, zero, bias, residual, out, partial, counts, N, K, words, groups, part,
    GROUPED: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr, IN_BLOCK: tl.constexpr, SHARED: tl.constexpr, J: tl.constexpr,
    BN: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    tile, which = tl.program_id(0), tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    index = tl.minimum(n, N - 1).to(tl.int64)
    begin = which * part
    end = tl.minimum(begin + part, tl.cdiv(K, 8 * J))
    acc = _products(
        x, w, scale, index, begin, end, K, words, groups,
        EVEN, GROUPED, IN_BLOCK, J, BN, STAGES, ASM,
    )  # fmt: skip
    acc -= _offsets(
        x, scale, zero, index, begin, end, K, groups, EVEN, GROUPED, ZERO, SHARED, J, BN
    )  # fmt: skip
    if not GROUPED:
        acc *= tl.load(scale + index).to(tl.float32)
    if PARTS == 1:
        _store(acc, n, N, bias, residual, out, BIAS, RESIDUAL)
    else:
        tl.store(partial + which * N + n, acc, n < N)
        tl.debug_barrier()  # all of the program's part is written before it says so
        if tl.atomic_add(counts + tile, 1, sem="acq_rel") == PARTS - 1:
            acc = tl.zeros((BN,), tl.float32)
            for other in range(PARTS):
                acc += tl.load(partial + other * N + n, n < N, 0.0, cache_modifier=".cg")
            _store(acc, n, N, bias, residual, out, BIAS, RESIDUAL)
            tl.store(counts + tile, 0)


def linear_one(
    x_1K: Tensor,
    weight: Packed,
    bias: Tensor | None,
    out_features: int,
    in_features: int,
    group: int,
    around: Any,
    cut: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """(1, N) in x's dtype, for 4 bits. `around`: norm, eps and residual of `Around`.

    cut: outputs of a program, parts of the inputs, stages, warps.
    """
    w, scale, zero = weight
    N, K, J = out_features, in_features, run_of(group)
    if around.norm is not None:
        x_1K = F.rms_norm(x_1K, (K,), around.norm, around.eps)
    outputs, parts, stages, warps = cut or _cut(N, K, J, processors(x_1K.device))
    blocks, tiles = triton.cdiv(K, 8 * J), triton.cdiv(N, outputs)
    out = x_1K.new_empty(1, N)
    partial = ended = out
    if parts > 1:
        assert tiles <= MOST_COUNTED
        partial = x_1K.new_empty(parts, N, dtype=torch.float32)
        ended = counts(x_1K.device)
    launch: Any = _one[(tiles, parts)]
    with torch.accelerator.device_index(x_1K.device.index):  # Triton takes the current one
        launch(
            *(x_1K, w, scale, scale if zero is None else zero, x_1K if bias is None else bias),
            *(x_1K if around.residual is None else around.residual, out, partial, ended),
            *(N, K, w.shape[1], scale.shape[-1], triton.cdiv(blocks, parts)),
            GROUPED=group > 0,
            ZERO=zero is not None,
            BIAS=bias is not None,
            RESIDUAL=around.residual is not None,
            EVEN=K % (8 * J) == 0,
            IN_BLOCK=max(1, 8 * J // group) if group else 1,
            SHARED=min(group or J, 8 * J),
            J=J,
            BN=outputs,
            PARTS=parts,
            STAGES=stages,
            ASM=x_1K.is_cuda and torch.version.cuda is not None,
            num_warps=warps,
        )
    return out


def _cut(N: int, K: int, J: int, processors: int) -> tuple[int, int, int, int]:
    """Enough programs for all of the processors' threads: of the cuts that were measured."""
    outputs, parts = 32, 1
    while parts < 16 and 2 * parts * N < 5 * processors * outputs and 16 * parts * J <= K:
        parts *= 2
    return outputs, parts, 1, 4
