"""The kernel of `triton_few.py`: a few tokens times a part of a tile of outputs' weights.

[Note: codes]
A code of 4 bits below the leading bit of a 16-bit float is a number without any arithmetic: 128 + c
in bf16, 1024 + c in fp16. Products of such numbers are exact, sums are in fp32, and what the
constant and the zero points added, Σ x (128 + zero) scale of each group, is taken off afterwards.
Bits 4i … 4i + 3 of the words of a block are J inputs in a row, so they multiply as a tile.

[Note: norm]
rsqrt(mean x²) is a factor of a token, so it multiplies the sum; x² is summed on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lezero.ops.triton_units import times


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
def gate(x, out, width, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(g) u of rows that hold g and u, (width,) each, one after the other."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m = tl.program_id(1).to(tl.int64)
    g = tl.load(x + 2 * m * width + at, at < width, 0.0)
    up = tl.load(x + (2 * m + 1) * width + at, at < width, 0.0)
    wide = g.to(tl.float32)
    wide = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
    tl.store(out + m * width + at, wide.to(g.dtype), at < width)


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
def _finish(  # type: ignore[no-untyped-def]
    acc, square, n, m, M, N, K, eps, bias, residual, out,
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
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
def _squares(square, x, few, k, M, K, stride, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    plain = _tokens(x, x, few, k, M, K, stride, False, EVEN).to(tl.float32)
    return square + plain * plain


@triton.jit
def _four_bits(  # type: ignore[no-untyped-def]
    x, norm, w, scale, zero, few, index, begin, end, M, K, stride, words, groups,
    GROUPED: tl.constexpr, ZERO: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr,
    TOKENS: tl.constexpr, LOADED: tl.constexpr, BN: tl.constexpr, J: tl.constexpr,
    IN_BLOCK: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sums of products (TOKENS, BN), of inputs `begin` … `end`, and squares of the tokens."""
    BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    base = 128.0 if BF16 else 1024.0
    acc = tl.zeros((TOKENS, BN), tl.float32)
    square = tl.zeros((LOADED, 8 * J), tl.float32)
    row = index * words
    j, eight = tl.arange(0, J), tl.arange(0, 8)
    for b in tl.range(begin // (8 * J), tl.cdiv(end, 8 * J), num_stages=STAGES):
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
            product = times(_rows(t, TOKENS), _number(word, i, ASM, BF16), WIDE)
            if GROUPED:
                acc += product * scales[i][None, :]
            else:
                acc += product
        k = b * 8 * J + tl.arange(0, 8 * J)
        t = _tokens(x, norm, few, k, M, K, stride, NORM, EVEN)
        if NORM:
            square = _squares(square, x, few, k, M, K, stride, EVEN)
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
    return acc, square


@triton.jit
def _whole(  # type: ignore[no-untyped-def]
    x, norm, w, scale, zero, few, index, begin, end, M, K, stride, words, groups, group,
    GROUPED: tl.constexpr, ZERO: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr,
    TOKENS: tl.constexpr, LOADED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """As `_four_bits`, of 8 and 16 bits."""
    kind = tl.float32 if WIDE else x.dtype.element_ty
    acc = tl.zeros((TOKENS, BN), tl.float32)
    square = tl.zeros((LOADED, BK), tl.float32)
    sums = tl.zeros((LOADED, BK), tl.float32)
    row = index * words
    for first in tl.range(begin, end, BK, num_stages=STAGES):
        k = first + tl.arange(0, BK)
        t = _tokens(x, norm, few, k, M, K, stride, NORM, EVEN)
        if NORM:
            square = _squares(square, x, few, k, M, K, stride, EVEN)
        if EVEN:
            v = tl.load(w + row[None, :] + k[:, None]).to(kind)
        else:
            v = tl.load(w + row[None, :] + k[:, None], (k < words)[:, None], 0).to(kind)
            v = tl.where((k < K)[:, None], v, 0.0)
        product = times(_rows(t, TOKENS), v, WIDE)
        if GROUPED:
            at = index * groups + first // group
            s = tl.load(scale + at).to(tl.float32)
            acc += product * s[None, :]
            if ZERO:
                offset = (tl.load(zero + at).to(tl.float32) - 128.0) * s
                acc -= tl.sum(t.to(tl.float32), 1)[:, None] * offset[None, :]
        else:
            acc += product
            if ZERO:
                sums += t.to(tl.float32)
    if ZERO and not GROUPED:
        offset = tl.load(zero + index).to(tl.float32) - 128.0
        acc -= tl.sum(sums, 1)[:, None] * offset[None, :]
    return acc, square


@triton.jit
def few(  # type: ignore[no-untyped-def]
    x, norm, w, scale, zero, bias, residual, out, partial, squares, counts,
    M, N, K, stride, words, groups, group, eps, part,
    BITS: tl.constexpr, GROUPED: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    TOKENS: tl.constexpr, LOADED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    J: tl.constexpr, IN_BLOCK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """BITS 16, 8 or 4. LOADED: 1 for one token, else TOKENS. IN_BLOCK: groups of a block of 8 J
    inputs. GROUPED: a scale is not of a whole row."""
    tile, which = tl.program_id(0), tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    loaded = tl.program_id(2) * TOKENS + tl.arange(0, LOADED)
    m = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    index = tl.minimum(n, N - 1).to(tl.int64)
    begin = which * part
    end = tl.minimum(begin + part, K)
    if BITS == 4:
        acc, square = _four_bits(
            x, norm, w, scale, zero, loaded, index, begin, end, M, K, stride, words, groups,
            GROUPED, ZERO, NORM, EVEN, TOKENS, LOADED, BN, J, IN_BLOCK, STAGES, ASM, WIDE,
        )  # fmt: skip
    else:
        acc, square = _whole(
            x, norm, w, scale, zero, loaded, index, begin, end, M, K, stride, words, groups, group,
            GROUPED, ZERO, NORM, EVEN, TOKENS, LOADED, BN, BK, STAGES, WIDE,
        )  # fmt: skip
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
            tl.store(squares + (tile * PARTS + which) * M + loaded, total, loaded < M)
        tl.debug_barrier()  # all of the program's parts are written before it says so
        count = counts + tl.program_id(2) * tl.num_programs(0) + tile
        if tl.atomic_add(count, 1, sem="acq_rel") == PARTS - 1:
            acc = tl.zeros((TOKENS, BN), tl.float32)
            total = tl.zeros((LOADED,), tl.float32)
            for other in range(PARTS):
                acc += tl.load(partial + other * M * N + to, mask, 0.0, cache_modifier=".cg")
                if NORM:
                    at = squares + (tile * PARTS + other) * M + loaded
                    total += tl.load(at, loaded < M, 0.0, cache_modifier=".cg")
            _finish(acc, total, n, m, M, N, K, eps, bias, residual, out, BIAS, NORM, RESIDUAL)
            tl.store(count, 0)
