"""One token times a weight of 4 bits on an accelerator: no matrix units, which would idle.

    out = norm(x) wᵀ + bias + residual

A program takes BN outputs and a part of the inputs. A code in the low bits of an fp16 number makes
that number 1024 + c; products and sums are in fp32. Instructions on whole numbers are what takes
the time (half as many a clock as others), so two codes are cut out together. Four neighbouring
products are added before their group's scale multiplies them; what 1024 and the zero points added
comes off once a group (Σ x). The programs of a tile of outputs add their parts as those of
`triton_few.py` do, so results do not depend on which ends last.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lezero.core.device import processors
from lezero.ops.linear.layout import Packed
from lezero.ops.linear.rows import run_of
from lezero.ops.triton_units import counts


def _bytes(selector: str, shift: str = "") -> tl.constexpr:
    """PTX: of two words one byte each, side by side, and four bits of each below 1024 in fp16."""
    bits = "lop3.b32 $0, t, 0x000f000f, 0x64006400, 0xea;"
    return tl.constexpr(f"{{ .reg .b32 t; prmt.b32 t, $1, $2, {selector}; {shift} {bits} }}")


_SHIFT = "shr.u32 t, t, 4;"
_CODE_0, _CODE_1 = _bytes("0x5410"), _bytes("0x5410", _SHIFT)
_CODE_2, _CODE_3 = _bytes("0x6521"), _bytes("0x6521", _SHIFT)
_CODE_4, _CODE_5 = _bytes("0x7632"), _bytes("0x7632", _SHIFT)
_CODE_6, _CODE_7 = _bytes("0x0743"), _bytes("0x0743", _SHIFT)


@triton.jit
def _code(word, i: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """1024 + code i of each word. ASM: two words at a time, half the instructions."""
    if ASM:
        if i == 0:
            half = tl.inline_asm_elementwise(_CODE_0, "=r,r,r", [word], tl.float16, True, 2)
        elif i == 1:
            half = tl.inline_asm_elementwise(_CODE_1, "=r,r,r", [word], tl.float16, True, 2)
        elif i == 2:
            half = tl.inline_asm_elementwise(_CODE_2, "=r,r,r", [word], tl.float16, True, 2)
        elif i == 3:
            half = tl.inline_asm_elementwise(_CODE_3, "=r,r,r", [word], tl.float16, True, 2)
        elif i == 4:
            half = tl.inline_asm_elementwise(_CODE_4, "=r,r,r", [word], tl.float16, True, 2)
        elif i == 5:
            half = tl.inline_asm_elementwise(_CODE_5, "=r,r,r", [word], tl.float16, True, 2)
        elif i == 6:
            half = tl.inline_asm_elementwise(_CODE_6, "=r,r,r", [word], tl.float16, True, 2)
        else:
            half = tl.inline_asm_elementwise(_CODE_7, "=r,r,r", [word], tl.float16, True, 2)
        return half.to(tl.float32)
    else:
        half = ((word >> (4 * i)) & 15) | 0x6400
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    x, norm, w, scale, index, begin, end, K, words, groups,
    NORM: tl.constexpr, EVEN: tl.constexpr, GROUPED: tl.constexpr, IN_BLOCK: tl.constexpr,
    J: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Σ (1024 + c) x, scaled where scales are of groups: (BN,)."""
    j = tl.arange(0, J)
    acc = tl.zeros((BN, J // 4), tl.float32)
    line = w + (index * words)[:, None] + j[None, :]
    for b in tl.range(begin, end, num_stages=STAGES):
        word = tl.load(line + b * J)
        for i in tl.static_range(8):
            k = (b * 8 + i) * J + j
            v = tl.load(x + k).to(tl.float32) if EVEN else tl.load(x + k, k < K, 0.0).to(tl.float32)
            if NORM:
                factor = tl.load(norm + k) if EVEN else tl.load(norm + k, k < K, 0.0)
                v = (v * factor.to(tl.float32)).to(x.dtype.element_ty).to(tl.float32)
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
    x, norm, scale, zero, index, begin, end, K, groups,
    NORM: tl.constexpr, EVEN: tl.constexpr, GROUPED: tl.constexpr, ZERO: tl.constexpr,
    SHARED: tl.constexpr, J: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Σ (1024 + zero) x, scaled as the products: (BN,); and Σ x² of what came before the norm.

    SHARED: inputs of one scale within a block of 8 J."""
    COUNT: tl.constexpr = 8 * J // SHARED
    g, inside = tl.arange(0, COUNT), tl.arange(0, SHARED)
    off = tl.zeros((BN,), tl.float32)
    square = tl.zeros((COUNT,), tl.float32)
    for b in range(begin, end):
        k = b * 8 * J + g[:, None] * SHARED + inside[None, :]
        v = tl.load(x + k, k < K, 0.0).to(tl.float32)
        square += tl.sum(v * v, 1)
        if NORM:
            factor = tl.load(norm + k, k < K, 0.0).to(tl.float32)
            v = (v * factor).to(x.dtype.element_ty).to(tl.float32)
        sums = tl.sum(v, 1)
        if GROUPED:
            at = b * COUNT + g
            at = index[:, None] * groups + (at if EVEN else tl.minimum(at, groups - 1))[None, :]
            factor = tl.load(scale + at).to(tl.float32)
            factor *= (1024.0 + tl.load(zero + at).to(tl.float32)) if ZERO else 1032.0
            off += tl.sum(factor * sums[None, :], 1)
        else:
            one = (1024.0 + tl.load(zero + index).to(tl.float32)) if ZERO else 1032.0
            off += one * tl.sum(sums, 0)
    return off, tl.sum(square, 0)


@triton.jit
def _store(acc, square, n, N, K, eps, bias, residual, out, BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    if NORM:
        acc = acc * tl.rsqrt(square / K + eps)
    if BIAS:
        acc += tl.load(bias + n, n < N, 0.0).to(tl.float32)
    if RESIDUAL:
        acc = acc.to(out.dtype.element_ty).to(tl.float32)
        acc += tl.load(residual + n, n < N, 0.0).to(tl.float32)
    tl.store(out + n, acc.to(out.dtype.element_ty), n < N)


@triton.jit
def _one(  # type: ignore[no-untyped-def]
    x, norm, w, scale, zero, bias, residual, out, partial, counts, N, K, words, groups, eps, part,
    GROUPED: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    RESIDUAL: tl.constexpr, EVEN: tl.constexpr, IN_BLOCK: tl.constexpr, SHARED: tl.constexpr,
    J: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    tile, which = tl.program_id(0), tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    index = tl.minimum(n, N - 1).to(tl.int64)
    begin = which * part
    end = tl.minimum(begin + part, tl.cdiv(K, 8 * J))
    acc = _products(
        x, norm, w, scale, index, begin, end, K, words, groups,
        NORM, EVEN, GROUPED, IN_BLOCK, J, BN, STAGES, ASM,
    )  # fmt: skip
    off, square = _offsets(
        x, norm, scale, zero, index, begin, end, K, groups,
        NORM, EVEN, GROUPED, ZERO, SHARED, J, BN,
    )  # fmt: skip
    acc -= off
    if not GROUPED:
        acc *= tl.load(scale + index).to(tl.float32)
    if PARTS == 1:
        _store(acc, square, n, N, K, eps, bias, residual, out, BIAS, NORM, RESIDUAL)
    else:
        tl.store(partial + which * N + n, acc, n < N)
        squares = partial + PARTS * N + tile * PARTS
        tl.store(squares + which, square)
        tl.debug_barrier()  # all of the program's part is written before it says so
        if tl.atomic_add(counts + tile, 1, sem="acq_rel") == PARTS - 1:
            acc = tl.zeros((BN,), tl.float32)
            square = 0.0
            for other in range(PARTS):
                acc += tl.load(partial + other * N + n, n < N, 0.0, cache_modifier=".cg")
                square += tl.load(squares + other, cache_modifier=".cg")
            _store(acc, square, n, N, K, eps, bias, residual, out, BIAS, NORM, RESIDUAL)
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
    outputs, parts, stages, warps = cut or _cut(N, K, J, processors(x_1K.device))
    blocks, tiles = triton.cdiv(K, 8 * J), triton.cdiv(N, outputs)
    out = x_1K.new_empty(1, N)
    partial = ended = out
    if parts > 1:
        partial = x_1K.new_empty(parts * (N + tiles), dtype=torch.float32)
        ended = counts(x_1K.device)
    launch: Any = _one[(tiles, parts)]
    with torch.accelerator.device_index(x_1K.device.index):  # Triton takes the current one
        launch(
            *(x_1K, x_1K if around.norm is None else around.norm, w, scale),
            *(scale if zero is None else zero, x_1K if bias is None else bias),
            *(x_1K if around.residual is None else around.residual, out, partial, ended),
            *(N, K, w.shape[1], scale.shape[-1], around.eps, triton.cdiv(blocks, parts)),
            GROUPED=group > 0,
            ZERO=zero is not None,
            BIAS=bias is not None,
            NORM=around.norm is not None,
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
    """Enough programs for all of the processors' threads."""
    outputs, parts = 32, 1
    while parts < 16 and 2 * parts * N < 5 * processors * outputs and 16 * parts * J <= K:
        parts *= 2
    return outputs, parts, 1, 4
