"""The block codecs on an accelerator: the same bytes as `reference.py` gives.

Needs the package triton, which torch's builds for accelerators bring. Values and errors in bf16
come as their bits. Letters: R blocks a program, B elements a block, G fours a block.

[Note: the current device]
Triton launches on the current device whatever its arguments are on, and ops that are registered in
Python are called without a guard. So each launch sets it.

[Note: exact arithmetic]
Products and the sums around them are not fused (`enable_fp_fusion=False`), divisions are rounded to
nearest, and the magnitudes of sign are summed in the order that the reference names.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lezero.ops.codec.layout import FORMS, Layout

INT8, INT4, SIGN, SPARSE_BF16, SPARSE_INT8, SPARSE_INT4 = map(tl.constexpr, range(6))
SHIFT = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding and subtracting it rounds to an integer
NAN = tl.constexpr(0x7FC0)
INFINITE = tl.constexpr(0x7F800000)
INFINITE_IN_BF16 = tl.constexpr(0x7F7F8000)  # what is rounded to infinity there
_TILE = 2048


@triton.jit
def _to_bf16(x):  # type: ignore[no-untyped-def]
    """The bits of the nearest bf16, halves to even."""
    bits = x.to(tl.int32, bitcast=True)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((bits & 0x7FFFFFFF) > INFINITE, NAN, near)


@triton.jit
def _from_bf16(bits):  # type: ignore[no-untyped-def]
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _read(x, at, mask, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.load(x + at, mask, other=0)
    return _from_bf16(value) if BF16 else value.to(tl.float32)


@triton.jit
def _write(x, at, value, mask, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + at, _to_bf16(value).to(tl.int16) if BF16 else value, mask)


@triton.jit
def _keep(error, at, lost, mask, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes what was lost, but where that is infinite as it is kept."""
    finite = _size(lost) < (INFINITE_IN_BF16 if BF16 else INFINITE)
    _write(error, at, lost, mask & finite, BF16)


@triton.jit
def _total(x, error, at, numel, BF16: tl.constexpr, KEPT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values, the error added where there is one (KEPT 1: fp32, 2: bf16)."""
    value = _read(x, at, at < numel, BF16)
    if KEPT > 0:
        value = value + _read(error, at, at < numel, KEPT == 2)
    return value


@triton.jit
def _size(x):  # type: ignore[no-untyped-def]
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(top, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each block the bits of its scale, the scale, its inverse, and whether it is finite."""
    good = top < INFINITE
    exact = tl.math.div_rn(tl.where(good, top, 0).to(tl.float32, bitcast=True), LEVELS + 0.0)
    bits = (exact.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    bits = tl.where(bits < 0x80, 0, bits)
    step = _from_bf16(bits)
    inverse = tl.where(bits > 0, tl.math.div_rn(1.0, tl.where(bits > 0, step, 1.0)), 0.0)
    return tl.where(good, bits, NAN), step, inverse, good


@triton.jit
def _store_scale(payload, rows, bits, blocks):  # type: ignore[no-untyped-def]
    tl.store(payload + 2 * rows, (bits & 0xFF).to(tl.uint8), rows < blocks)
    tl.store(payload + 2 * rows + 1, (bits >> 8).to(tl.uint8), rows < blocks)


@triton.jit
def _level(x, inverse):  # type: ignore[no-untyped-def]
    return ((x * inverse) + SHIFT) - SHIFT


@triton.jit
def _encode_dense(  # type: ignore[no-untyped-def]
    x, error, payload, numel, blocks, data,
    FORM: tl.constexpr, B: tl.constexpr, R: tl.constexpr, BF16: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """int8 and int4: elements 2i and 2i+1 are worked on side by side."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    even = rows[:, None] * B + 2 * tl.arange(0, B // 2)[None, :]
    x0 = _total(x, error, even, numel, BF16, KEPT)
    x1 = _total(x, error, even + 1, numel, BF16, KEPT)
    top = tl.maximum(tl.max(_size(x0), 1), tl.max(_size(x1), 1))
    bits, step, inverse, good = _scale(top, 127 if FORM == INT8 else 7)
    _store_scale(payload, rows, bits, blocks)
    q0 = _level(tl.where(good[:, None], x0, 0.0), inverse[:, None])
    q1 = _level(tl.where(good[:, None], x1, 0.0), inverse[:, None])
    i0, i1 = q0.to(tl.int32), q1.to(tl.int32)
    if FORM == INT8:
        tl.store(payload + data + even, (i0 & 0xFF).to(tl.uint8), even < numel)
        tl.store(payload + data + even + 1, (i1 & 0xFF).to(tl.uint8), even + 1 < numel)
    else:
        byte = (i0 + 8) | ((i1 + 8) << 4)
        tl.store(payload + data + even // 2, byte.to(tl.uint8), even < numel)
    if KEPT > 0:
        _keep(error, even, x0 - q0 * step[:, None], good[:, None] & (even < numel), KEPT == 2)
        odd = good[:, None] & (even + 1 < numel)
        _keep(error, even + 1, x1 - q1 * step[:, None], odd, KEPT == 2)


@triton.jit
def _halves(x, WIDTH: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """The second half of each row added to the first."""
    one, other = tl.split(tl.permute(tl.reshape(x, (R, 2, WIDTH // 2)), (0, 2, 1)))
    return one + other


@triton.jit
def _encode_sign(  # type: ignore[no-untyped-def]
    x, error, payload, numel, blocks, data,
    B: tl.constexpr, R: tl.constexpr, BF16: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    lanes = rows[:, None] * B + tl.arange(0, 16)[None, :]
    sums = tl.zeros((R, 16), tl.float32)
    for part in range(B // 16):
        sums += tl.abs(_total(x, error, lanes + 16 * part, numel, BF16, KEPT))
    sums = _halves(_halves(_halves(sums, 16, R), 8, R), 4, R)
    one, other = tl.split(sums)
    count = tl.minimum(tl.maximum(numel - rows * B, 1), B).to(tl.float32)
    bits = _to_bf16(tl.math.div_rn(one + other, count))
    good = bits < (INFINITE >> 16)
    bits = tl.where(good, bits, NAN)
    _store_scale(payload, rows, bits, blocks)
    at = rows[:, None, None] * B + 8 * tl.arange(0, B // 8)[None, :, None]
    each = tl.arange(0, 8)[None, None, :]
    value = _total(x, error, at + each, numel, BF16, KEPT)
    negative = (value.to(tl.int32, bitcast=True) < 0) & good[:, None, None]
    byte = tl.sum(negative.to(tl.int32) << each, 2)
    first = rows[:, None] * B + 8 * tl.arange(0, B // 8)[None, :]
    tl.store(payload + data + first // 8, byte.to(tl.uint8), first < numel)
    if KEPT > 0:
        scale = _from_bf16(bits)[:, None, None]
        lost = value - tl.where(negative, -scale, scale)
        _keep(error, at + each, lost, good[:, None, None] & (at + each < numel), KEPT == 2)


@triton.jit
def _kept(mine, a, b, c, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 where at most one of three others is larger; A, B, C: it stands before and wins ties."""
    larger = ((a > mine) | (A & (a == mine))).to(tl.int32)
    larger += ((b > mine) | (B & (b == mine))).to(tl.int32)
    larger += ((c > mine) | (C & (c == mine))).to(tl.int32)
    return (larger < 2).to(tl.int32)


@triton.jit
def _encode_sparse(  # type: ignore[no-untyped-def]
    x, error, payload, numel, blocks, kept, data,
    FORM: tl.constexpr, B: tl.constexpr, R: tl.constexpr, BF16: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """2:4: two fours, a byte of kept bits, side by side; G = B / 8 such pairs a block."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    G: tl.constexpr = B // 4
    four = rows[:, None] * G + tl.arange(0, G)[None, :]
    at = 4 * four
    x0 = _total(x, error, at, numel, BF16, KEPT)
    x1 = _total(x, error, at + 1, numel, BF16, KEPT)
    x2 = _total(x, error, at + 2, numel, BF16, KEPT)
    x3 = _total(x, error, at + 3, numel, BF16, KEPT)
    top = tl.maximum(tl.maximum(_size(x0), _size(x1)), tl.maximum(_size(x2), _size(x3)))
    bits, step, inverse, good = _scale(tl.max(top, 1), 127 if FORM == SPARSE_INT8 else 7)
    if FORM != SPARSE_BF16:
        _store_scale(payload, rows, bits, blocks)
    fine = good[:, None]
    filler = float("nan") if FORM == SPARSE_BF16 else 0.0
    y0, y1 = tl.where(fine, x0, filler), tl.where(fine, x1, filler)
    y2, y3 = tl.where(fine, x2, filler), tl.where(fine, x3, filler)
    s0, s1, s2, s3 = _size(y0), _size(y1), _size(y2), _size(y3)
    k0 = _kept(s0, s1, s2, s3, False, False, False)
    k1 = _kept(s1, s0, s2, s3, True, False, False)
    k2 = _kept(s2, s0, s1, s3, True, True, False)
    k3 = _kept(s3, s0, s1, s2, True, True, True)
    low, high = tl.split(tl.reshape(k0 | (k1 << 1) | (k2 << 2) | (k3 << 3), (R, G // 2, 2)))
    pair = rows[:, None] * (G // 2) + tl.arange(0, G // 2)[None, :]
    tl.store(payload + kept + pair, (low | (high << 4)).to(tl.uint8), 8 * pair < numel)
    first = tl.where(k0 > 0, y0, tl.where(k1 > 0, y1, y2))
    second = tl.where(k3 > 0, y3, tl.where(k2 > 0, y2, y1))
    there = at < numel
    if FORM == SPARSE_BF16:
        b0, b1 = _to_bf16(first), _to_bf16(second)
        d0, d1 = _from_bf16(b0), _from_bf16(b1)
        tl.store(payload + data + at, (b0 & 0xFF).to(tl.uint8), there)
        tl.store(payload + data + at + 1, (b0 >> 8).to(tl.uint8), there)
        tl.store(payload + data + at + 2, (b1 & 0xFF).to(tl.uint8), there)
        tl.store(payload + data + at + 3, (b1 >> 8).to(tl.uint8), there)
    else:
        q0, q1 = _level(first, inverse[:, None]), _level(second, inverse[:, None])
        d0, d1 = q0 * step[:, None], q1 * step[:, None]
        i0, i1 = q0.to(tl.int32), q1.to(tl.int32)
        if FORM == SPARSE_INT8:
            tl.store(payload + data + 2 * four, (i0 & 0xFF).to(tl.uint8), there)
            tl.store(payload + data + 2 * four + 1, (i1 & 0xFF).to(tl.uint8), there)
        else:
            tl.store(payload + data + four, ((i0 + 8) | ((i1 + 8) << 4)).to(tl.uint8), there)
    if KEPT > 0:
        there = there & fine
        _keep(error, at, x0 - tl.where(k0 > 0, d0, 0.0), there, KEPT == 2)
        lost = x1 - tl.where(k1 > 0, tl.where(k0 > 0, d1, d0), 0.0)
        _keep(error, at + 1, lost, there & (at + 1 < numel), KEPT == 2)
        lost = x2 - tl.where(k2 > 0, tl.where(k3 > 0, d0, d1), 0.0)
        _keep(error, at + 2, lost, there & (at + 2 < numel), KEPT == 2)
        lost = x3 - tl.where(k3 > 0, d1, 0.0)
        _keep(error, at + 3, lost, there & (at + 3 < numel), KEPT == 2)


@triton.jit
def _byte(payload, at, mask):  # type: ignore[no-untyped-def]
    return tl.load(payload + at, mask, other=0).to(tl.int32)


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    payload, out, numel, kept, data,
    FORM: tl.constexpr, B: tl.constexpr, BF16: tl.constexpr, ADD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < numel
    if FORM != SPARSE_BF16:
        row = at // B
        scale = _from_bf16(_byte(payload, 2 * row, mask) | (_byte(payload, 2 * row + 1, mask) << 8))
    if FORM >= SPARSE_BF16:
        lane = (at % 4).to(tl.int32)
        bits = (_byte(payload, kept + at // 8, mask) >> (at % 8 - lane).to(tl.int32)) & 15
        before = bits & ((1 << lane) - 1)
        place = (before & 1) + ((before >> 1) & 1) + ((before >> 2) & 1)
        there = mask & (((bits >> lane) & 1) > 0)
        entry = at // 4 * 2 + place
    if FORM == INT8:
        byte = _byte(payload, data + at, mask)
        value = (byte - ((byte & 128) << 1)).to(tl.float32) * scale
    elif FORM == INT4:
        half = _byte(payload, data + at // 2, mask) >> (4 * (at % 2)).to(tl.int32)
        value = ((half & 15) - 8).to(tl.float32) * scale
    elif FORM == SIGN:
        negative = (_byte(payload, data + at // 8, mask) >> (at % 8).to(tl.int32)) & 1
        value = tl.where(negative > 0, -scale, scale)
    elif FORM == SPARSE_BF16:
        low = _byte(payload, data + 2 * entry, there)
        value = _from_bf16(low | (_byte(payload, data + 2 * entry + 1, there) << 8))
    elif FORM == SPARSE_INT8:
        byte = _byte(payload, data + entry, there)
        value = (byte - ((byte & 128) << 1)).to(tl.float32) * scale
    else:
        half = _byte(payload, data + at // 4, there) >> (4 * place)
        value = ((half & 15) - 8).to(tl.float32) * scale
    if FORM >= SPARSE_BF16:
        value = tl.where(there, value, 0.0)
    if ADD:
        value = _read(out, at, mask, BF16) + value
    _write(out, at, value, mask, BF16)


def encode(values: Tensor, payload: Tensor, error: Tensor | None, form: str, block: int) -> None:
    """`reference.encode` for fp32 and bf16 tensors of an accelerator."""
    layout = Layout(form, values.numel(), block)
    if not layout.numel:
        return
    rows = max(1, _TILE // block)
    kept = 0 if error is None else 1 + (error.dtype == torch.bfloat16)
    tensors = (_bits(values), _bits(values if error is None else error), payload)
    sizes: dict[str, Any] = {"B": block, "R": rows, "KEPT": kept, "enable_fp_fusion": False}
    sizes["BF16"] = values.dtype == torch.bfloat16
    grid, at = (triton.cdiv(layout.blocks, rows),), (layout.numel, layout.blocks)
    data = layout.scales + layout.kept
    with torch.accelerator.device_index(values.device.index):
        if form == "sign":
            _encode_sign[grid](*tensors, *at, data, **sizes)
        elif layout.sparse:
            places = (*at, layout.scales, data)
            _encode_sparse[grid](*tensors, *places, FORM=FORMS.index(form), **sizes)
        else:
            _encode_dense[grid](*tensors, *at, data, FORM=FORMS.index(form), **sizes)


def decode(payload: Tensor, out: Tensor, form: str, block: int, add: bool) -> None:
    """`reference.decode` into fp32 and bf16 tensors of an accelerator."""
    layout = Layout(form, out.numel(), block)
    if not layout.numel:
        return
    with torch.accelerator.device_index(out.device.index):
        _decode[(triton.cdiv(layout.numel, _TILE),)](
            payload,
            _bits(out),
            layout.numel,
            layout.scales,
            layout.scales + layout.kept,
            FORM=FORMS.index(form),
            B=block,
            BF16=out.dtype == torch.bfloat16,
            ADD=add,
            TILE=_TILE,
            enable_fp_fusion=False,
        )


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x
