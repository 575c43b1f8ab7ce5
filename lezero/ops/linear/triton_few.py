"""Products of few tokens with a weight, and what stands around them in a decoder, in one launch.

    out = norm(x) wᵀ + bias + residual

The weight is read once: that is the time. It is bf16 or fp16 (N, K) or in the row layout of
`rows.py`. A program takes BN outputs, all tokens (16 or 32 at a time, on the matrix units) and a
part of the inputs; of the programs of one tile of outputs the last to end adds the parts, in their
order, so that results do not depend on which one that is, nor on the number of tokens.

[Note: codes]
A code of 4 bits below the leading bit of a 16-bit float is a number without any arithmetic: 128 + c
in bf16, 1024 + c in fp16. Products of such numbers are exact, sums are in fp32, and what the
constant and the zero points added, Σ x (128 + zero) scale of each group, is taken off afterwards.
Bits 4i … 4i + 3 of the words of a block are J inputs in a row, so they multiply as a tile.

[Note: norm]
rsqrt(mean x²) is a factor of a token, so it multiplies the sum; x² is summed on the way.

[Note: early launch]
With `early`, a launch that follows another on the same stream begins before that one ends
(programmatic dependent launch): it asks for its weights, which nobody writes, and waits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lezero.core.device import processors
from lezero.ops.linear.layout import Packed

MOST_TOKENS = 64
_TILES = 1 << 16  # of outputs, of a launch at most
_GATES = 1024  # of a program
MOST_LINES = 8  # of 256 bytes a row, asked for early
_LINE = tl.constexpr(256)  # bytes that are asked for together


class Around(NamedTuple):
    """What stands around a product. `norm`: (K,) weight of an RMS norm of x, with `eps`. `gated`: x
    is (M, 2 K), a gate and what it multiplies. `residual`: (M, N), added to the rounded product."""

    norm: Tensor | None = None
    eps: float = 0.0
    gated: bool = False
    residual: Tensor | None = None
    early: bool = False


_NOTHING = Around()


class Cut(NamedTuple):
    """How the work is cut: outputs and inputs of a tile, parts of the inputs, stages, warps."""

    outputs: int
    inputs: int
    parts: int
    stages: int
    warps: int


@triton.jit
def _tokens(  # type: ignore[no-untyped-def]
    x, norm, m, k, M, K, stride, NORM: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """A tile of inputs, (tokens, inputs)."""
    mask = (m < M)[:, None] if EVEN else (m < M)[:, None] & (k < K)[None, :]
    t = tl.load(x + m[:, None] * stride + k[None, :], mask, 0.0)
    if NORM:
        factor = tl.load(norm + k) if EVEN else tl.load(norm + k, k < K, 0.0)
        t = (t.to(tl.float32) * factor.to(tl.float32)[None, :]).to(t.dtype)
    return t


@triton.jit
def _rows(t, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row as often as products on the matrix units want rows; more are as they are."""
    return tl.broadcast_to(t, (TOKENS, t.shape[1])) if t.shape[0] == 1 else t


@triton.jit
def _gate(x, out, width, TILE: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m = tl.program_id(1).to(tl.int64)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(x + 2 * m * width + at, at < width, 0.0)
    up = tl.load(x + (2 * m + 1) * width + at, at < width, 0.0)
    wide = gate.to(tl.float32)
    wide = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
    tl.store(out + m * width + at, wide.to(gate.dtype), at < width)


@triton.jit
def _times(a, b, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """a b in fp32. WIDE: in the interpreter, which does not multiply bf16."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


def _code(selector: str, shift: str = "") -> tl.constexpr:
    """PTX: of two words one byte each, side by side, and of these four bits below 128 in bf16."""
    bits = "lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea;"
    return tl.constexpr(f"{{ .reg .b32 t; prmt.b32 t, $1, $2, {selector}; {shift} {bits} }}")


_SHIFT = "shr.u32 t, t, 4;"
_CODE_0, _CODE_1 = _code("0x5410"), _code("0x5410", _SHIFT)
_CODE_2, _CODE_3 = _code("0x6521"), _code("0x6521", _SHIFT)
_CODE_4, _CODE_5 = _code("0x7632"), _code("0x7632", _SHIFT)
_CODE_6, _CODE_7 = _code("0x0743"), _code("0x0743", _SHIFT)


@triton.jit
def _number(word, i: tl.constexpr, ASM: tl.constexpr, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """Code i of each word as a float, plus 128 (bf16) or 1024 (fp16)."""
    if ASM:
        if i == 0:
            return tl.inline_asm_elementwise(_CODE_0, "=r,r,r", [word], tl.bfloat16, True, 2)
        if i == 1:
            return tl.inline_asm_elementwise(_CODE_1, "=r,r,r", [word], tl.bfloat16, True, 2)
        if i == 2:
            return tl.inline_asm_elementwise(_CODE_2, "=r,r,r", [word], tl.bfloat16, True, 2)
        if i == 3:
            return tl.inline_asm_elementwise(_CODE_3, "=r,r,r", [word], tl.bfloat16, True, 2)
        if i == 4:
            return tl.inline_asm_elementwise(_CODE_4, "=r,r,r", [word], tl.bfloat16, True, 2)
        if i == 5:
            return tl.inline_asm_elementwise(_CODE_5, "=r,r,r", [word], tl.bfloat16, True, 2)
        if i == 6:
            return tl.inline_asm_elementwise(_CODE_6, "=r,r,r", [word], tl.bfloat16, True, 2)
        return tl.inline_asm_elementwise(_CODE_7, "=r,r,r", [word], tl.bfloat16, True, 2)
    elif BF16:
        return (((word >> (4 * i)) & 15) | 0x4300).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return (((word >> (4 * i)) & 15) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _eight(x, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The columns of (N, 8)."""
    even, odd = tl.split(tl.reshape(x, (N, 4, 2)))
    x04, x26 = tl.split(tl.reshape(even, (N, 2, 2)))
    x15, x37 = tl.split(tl.reshape(odd, (N, 2, 2)))
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _finish(acc, square, n, m, M, N, K, eps, bias, residual, out, BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    to = m[:, None] * N + n[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    if NORM:
        acc = acc * tl.rsqrt(square / K + eps)[:, None]
    if BIAS:
        acc += tl.load(bias + n, n < N, 0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        acc = acc.to(out.dtype.element_ty).to(tl.float32)
        acc += tl.load(residual + to, mask, 0.0).to(tl.float32)
    tl.store(out + to, acc.to(out.dtype.element_ty), mask)


@triton.jit
def _few(  # type: ignore[no-untyped-def]
    x, norm, w, scale, zero, bias, residual, out, partial, squares, counts,
    M, N, K, stride, words, groups, group, eps, part,
    BITS: tl.constexpr, GROUPED: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    TOKENS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, J: tl.constexpr,
    IN_BLOCK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    LINES: tl.constexpr, ASM: tl.constexpr, WIDE: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """BITS 16, 8 or 4. J inputs are codes of one place in their words. IN_BLOCK: groups of a block
    of 8 J inputs. GROUPED: a scale is not of a whole row. LINES: of 256 bytes of a row that are
    asked for before the launch before this one has ended."""
    tile, which = tl.program_id(0), tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    LOADED: tl.constexpr = 1 if ONE else TOKENS
    few = tl.program_id(2) * TOKENS + tl.arange(0, LOADED)
    m = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    index = tl.minimum(n, N - 1).to(tl.int64)
    row = index * words
    begin = which * part
    if EARLY:
        gdc_launch_dependents()
        if LINES > 0:
            first = w + row + (begin // 8 if BITS == 4 else begin)
            line = (
                first.to(tl.int64, bitcast=True)[:, None] + (tl.arange(0, LINES) * _LINE)[None, :]
            )
            tl.inline_asm_elementwise("cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0;", "=r,l", [line], tl.int32, False, 1)  # fmt: skip  # noqa: E501
        gdc_wait()
    BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    kind = tl.float32 if WIDE else x.dtype.element_ty
    base = 128.0 if BF16 else 1024.0
    acc = tl.zeros((TOKENS, BN), tl.float32)
    square = tl.zeros((LOADED, BK), tl.float32)
    if BITS == 4:
        j, eight = tl.arange(0, J), tl.arange(0, 8)
        end = tl.cdiv(tl.minimum(begin + part, K), 8 * J)
        for b in tl.range(begin // (8 * J), end, num_stages=STAGES):
            word = tl.load(w + row[None, :] + (b * J + j)[:, None])
            if GROUPED:
                at = b * 8 + eight if IN_BLOCK == 8 else b * IN_BLOCK + eight * IN_BLOCK // 8
                if not EVEN:
                    at = tl.minimum(at, groups - 1)
                at = (index * groups)[:, None] + at[None, :]
                s8 = tl.load(scale + at).to(tl.float32)
                scales = _eight(s8, BN)
            for i in tl.static_range(8):
                k = (b * 8 + i) * J + j
                t = _tokens(x, norm, few, k, M, K, stride, NORM, EVEN)
                product = _times(_rows(t, TOKENS), _number(word, i, ASM, BF16), WIDE)
                if GROUPED:
                    acc += product * scales[i][None, :]
                else:
                    acc += product
            k = b * 8 * J + tl.arange(0, 8 * J)
            t = _tokens(x, norm, few, k, M, K, stride, NORM, EVEN)
            if NORM:
                plain = _tokens(x, norm, few, k, M, K, stride, False, EVEN).to(tl.float32)
                square += plain * plain
            sums = tl.sum(tl.reshape(t.to(tl.float32), (LOADED, 16, J // 2)), 2)
            if GROUPED:
                if ZERO:
                    s8 *= tl.load(zero + at).to(tl.float32) + base
                else:
                    s8 *= base + 8.0
                s16 = tl.reshape(tl.join(s8, s8), (BN, 16))
                acc -= tl.dot(_rows(sums, TOKENS), tl.trans(s16), input_precision="tf32x3")
            else:
                if ZERO:
                    offset = tl.load(zero + index).to(tl.float32) + base
                else:
                    offset = tl.full((BN,), base + 8.0, tl.float32)
                acc -= tl.sum(sums, 1)[:, None] * offset[None, :]
    else:
        sums = tl.zeros((LOADED, BK), tl.float32)
        for first in tl.range(begin, tl.minimum(begin + part, K), BK, num_stages=STAGES):
            k = first + tl.arange(0, BK)
            t = _tokens(x, norm, few, k, M, K, stride, NORM, EVEN)
            if NORM:
                plain = _tokens(x, norm, few, k, M, K, stride, False, EVEN).to(tl.float32)
                square += plain * plain
            if EVEN:
                v = tl.load(w + row[None, :] + k[:, None]).to(kind)
            else:
                v = tl.load(w + row[None, :] + k[:, None], (k < words)[:, None], 0).to(kind)
                v = tl.where((k < K)[:, None], v, 0.0)
            if GROUPED:
                at = index * groups + first // group
                s = tl.load(scale + at).to(tl.float32)
                acc += _times(_rows(t, TOKENS), v, WIDE) * s[None, :]
                if ZERO:
                    offset = (tl.load(zero + at).to(tl.float32) - 128.0) * s
                    acc -= tl.sum(t.to(tl.float32), 1)[:, None] * offset[None, :]
            else:
                acc += _times(_rows(t, TOKENS), v, WIDE)
                if ZERO:
                    sums += t.to(tl.float32)
        if ZERO and not GROUPED:
            acc -= (
                tl.sum(sums, 1)[:, None] * (tl.load(zero + index).to(tl.float32) - 128.0)[None, :]
            )
    if BITS < 16 and not GROUPED:
        acc = acc * tl.load(scale + index).to(tl.float32)[None, :]
    total = tl.sum(square, 1)
    if PARTS == 1:
        _finish(acc, total, n, m, M, N, K, eps, bias, residual, out, BIAS, NORM, RESIDUAL)
    else:
        to = m[:, None] * N + n[None, :]
        mask = (m < M)[:, None] & (n < N)[None, :]
        tl.store(partial + which * M * N + to, acc, mask)
        if NORM:
            tl.store(squares + (tile * PARTS + which) * M + few, total, few < M)
        tl.debug_barrier()  # all of the program's parts are written before it says so
        count = counts + tl.program_id(2) * tl.num_programs(0) + tile
        if tl.atomic_add(count, 1, sem="acq_rel") == PARTS - 1:
            acc = tl.zeros((TOKENS, BN), tl.float32)
            total = tl.zeros((LOADED,), tl.float32)
            for other in range(PARTS):
                acc += tl.load(partial + other * M * N + to, mask, 0.0, cache_modifier=".cg")
                if NORM:
                    at = squares + (tile * PARTS + other) * M + few
                    total += tl.load(at, few < M, 0.0, cache_modifier=".cg")
            _finish(acc, total, n, m, M, N, K, eps, bias, residual, out, BIAS, NORM, RESIDUAL)
            tl.store(count, 0)


def linear_few(
    x_MK: Tensor,
    weight: Packed,
    bias: Tensor | None,
    out_features: int,
    in_features: int,
    bits: int,
    group: int,
    around: Around = _NOTHING,
    cut: Cut | None = None,
) -> Tensor:
    """(M, N) in x's dtype, bf16 or fp16, for up to 64 tokens; rows of `x_MK` may lie apart.

    `bits` 16: `weight.weight` is (N, K) in x's dtype, scale and zero are not looked at. `suits`
    says which groups there are.
    """
    w, scale, zero = weight
    M, N, K = len(x_MK), out_features, in_features
    out = x_MK.new_empty(M, N)
    if not M:
        return out
    if around.gated:
        x_MK = _gated(x_MK, K, around.early)
    cut = cut or best_cut(N, K, bits, group, processors(x_MK.device))
    block = 8 * depth(group)
    unit = block if bits == 4 else cut.inputs
    part = triton.cdiv(triton.cdiv(K, unit), cut.parts) * unit
    tokens = 16 if M <= 16 or bits == 4 else 32
    grid = (triton.cdiv(N, cut.outputs), cut.parts, triton.cdiv(M, tokens))
    assert grid[0] * grid[2] <= _TILES
    partial = squares = counts = x_MK
    if cut.parts > 1:
        partial = x_MK.new_empty(cut.parts, M, N, dtype=torch.float32)
        squares = x_MK.new_empty(grid[0], cut.parts, M, dtype=torch.float32)
        counts = _counts(x_MK.device, torch.accelerator.current_stream(x_MK.device).stream_id)
    lines = min(MOST_LINES, part * bits // 8 // _LINE.value) if around.early else 0
    launch: Any = _few[grid]
    with torch.accelerator.device_index(x_MK.device.index):  # Triton takes the current one
        launch(
            *(x_MK, x_MK if around.norm is None else around.norm, w, scale),
            *(scale if zero is None else zero, x_MK if bias is None else bias),
            *(x_MK if around.residual is None else around.residual, out),
            *(partial, squares, counts, M, N, K, x_MK.stride(0), w.shape[1]),
            *(scale.shape[-1], group, around.eps, part),
            BITS=bits,
            GROUPED=bits < 16 and group > 0,
            ZERO=bits < 16 and zero is not None,
            BIAS=bias is not None,
            NORM=around.norm is not None,
            RESIDUAL=around.residual is not None,
            EVEN=K % unit == 0,
            TOKENS=tokens,
            BN=cut.outputs,
            BK=unit,
            J=depth(group),
            IN_BLOCK=max(1, block // group) if group else 1,
            PARTS=cut.parts,
            STAGES=cut.stages,
            EARLY=around.early,
            LINES=1 << (lines.bit_length() - 1) if lines else 0,
            ASM=x_MK.dtype == torch.bfloat16 and x_MK.is_cuda and torch.version.cuda is not None,
            WIDE=x_MK.device.type == "cpu",
            ONE=M == 1,
            num_warps=cut.warps,
            **({"launch_pdl": True} if around.early else {}),
        )
    return out


def _gated(x: Tensor, width: int, early: bool) -> Tensor:
    out = x.new_empty(len(x), width)
    launch: Any = _gate[(triton.cdiv(width, _GATES), len(x))]
    with torch.accelerator.device_index(x.device.index):
        launch(x, out, width, TILE=_GATES, EARLY=early, **({"launch_pdl": True} if early else {}))
    return out


def suits(dtype: torch.dtype, bits: int, group: int) -> bool:
    """Whether there is a kernel: for 16-bit tokens and groups of 32, 64, 128, 256, 512 or a row."""
    return dtype in (torch.bfloat16, torch.float16) and (bits == 16 or group in _GROUPS)


_GROUPS = (0, 32, 64, 128, 256, 512)


def depth(group: int) -> int:
    """J of the row layout."""
    return 64 if group % 64 == 0 else 32


def best_cut(N: int, K: int, bits: int, group: int, processors: int) -> Cut:
    """Two to four programs a processor, each with as many bytes on their way as memory's latency
    asks for. Not a question of the number of tokens: see above."""
    if bits == 4:
        outputs, inputs, stages, warps = 64 if N >= 8192 else 32, 8 * depth(group), 3, 4
    elif bits == 8:
        outputs, inputs, stages, warps = 32, min(512, group or 512), 3, 4
    else:
        outputs, inputs, stages, warps = (32, 256, 4, 4) if N >= 8192 else (16, 256, 4, 2)
    parts = 1
    while (
        parts < 8
        and parts * triton.cdiv(N, outputs) < 2 * processors
        and K // (2 * parts) >= inputs
    ):
        parts *= 2
    return Cut(outputs, inputs, parts, stages, warps)


@functools.cache
def _counts(device: torch.device, stream: int) -> Tensor:
    """Of programs that have ended, for each tile; 0 between launches. One for each stream, since
    launches of two may overlap."""
    return torch.zeros(_TILES, dtype=torch.int32, device=device)
