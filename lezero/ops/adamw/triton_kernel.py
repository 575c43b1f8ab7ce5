"""AdamW on an accelerator: one launch of a Triton kernel for many parameters.

The arithmetic is `reference.py`'s, operation for operation. Weights and gradients in bf16 come as
their bits. Options come as arguments, since a tensor of them would have to be copied at every
launch. Needs the package triton, which torch's builds for accelerators bring.

[Note: the table]
A launch of its own costs the host more than small parameters cost the device. So parameters that
are kept alike and share their options go together: a table has a row for each, with the addresses
of its tensors. A program does a block of a row (8 bits) or a tile (fp32 moments), `CHUNK` programs
in a row do the same parameter, and `chunks` says which. Addresses seldom change from step to step,
and the table stays on the device as long; a new one is copied without a wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lezero.ops.adamw import eight_bit, reference
from lezero.ops.adamw.reference import Coefficients, Problem

FP32, BF16, MASTER, REMAINDER = (tl.constexpr(kind) for kind in range(4))
BLOCK = tl.constexpr(eight_bit.BLOCK)
TILE = tl.constexpr(1024)
CHUNK = tl.constexpr(16)
WIDTH = tl.constexpr(12)  # of the table: first chunk, blocks, size, blocks in a row, addresses
VAST, ROOT = tl.constexpr(eight_bit.VAST), tl.constexpr(eight_bit.VAST**0.5)
SHIFT = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding and subtracting it rounds to an integer


@triton.jit
def _value(n, tables):  # type: ignore[no-untyped-def]
    """Magnitudes of code numbers."""
    decade = tl.zeros_like(n)
    for bit in tl.static_range(1, 8):
        decade += (n >= (1 << bit)).to(tl.int32)
    value = n.to(tl.float32) * tl.load(tables + 24 + decade) + tl.load(tables + 32 + decade)
    return tl.where(n > 0, value, 0.0)


@triton.jit
def _number(x, tables):  # type: ignore[no-untyped-def]
    """Code numbers of magnitudes between 0 and 1."""
    decade = (x < 0).to(tl.int32)
    for index in tl.static_range(1, 8):
        decade += (x >= tl.load(tables + index)).to(tl.int32)
    n = x * tl.load(tables + 8 + decade) + tl.load(tables + 16 + decade)
    n = (n + SHIFT) - SHIFT
    return tl.where(x >= tl.load(tables), n, 0.0).to(tl.int32)


@triton.jit
def _scale(values):  # type: ignore[no-untyped-def]
    """The block's scale, NaN where it holds what is not finite, and the factor of its values."""
    most = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    finite = most < 0x7F800000
    kept = finite & (most >= 0x00800000)
    scale = tl.where(kept, most.to(tl.float32, bitcast=True), 1.0)
    inverse = tl.where(kept, tl.math.div_rn(1.0, scale), 0.0)
    return tl.where(finite, tl.where(kept, scale, 0.0), float("nan")), inverse


@triton.jit
def _bf16_bits(bits):  # type: ignore[no-untyped-def]
    """fp32 bits with one NaN only, and those of their bf16: nearest, ties away from zero."""
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    quiet = tl.where(nan, ((bits >> 31) << 31) | 0x7FC00000, bits)
    return quiet, ((quiet + 0x8000) >> 16) & 0xFFFF


@triton.jit
def _weight(param, extra, at, mask, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == FP32:
        return tl.load(param + at, mask, 0.0)
    weight = tl.load(param + at, mask, 0).to(tl.int32)
    bits = weight << 16
    if KIND == MASTER:
        master = tl.load(extra + at, mask, 0.0).to(tl.int32, bitcast=True)
        _quiet, rounded = _bf16_bits(master)
        bits = tl.where(rounded == (weight & 0xFFFF), master, bits)
    if KIND == REMAINDER:
        low = tl.load(extra + at, mask, 0).to(tl.int32)
        low = tl.where((weight & 0x7FFF) == 0, tl.maximum(low, 0), low)
        bits = bits + low
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _keep(param, extra, at, mask, value, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == FP32:
        tl.store(param + at, value, mask)
    else:
        quiet, rounded = _bf16_bits(value.to(tl.int32, bitcast=True))
        tl.store(param + at, rounded.to(tl.int16), mask)
        if KIND == MASTER:
            tl.store(extra + at, quiet.to(tl.float32, bitcast=True), mask)
        if KIND == REMAINDER:
            tl.store(extra + at, (quiet & 0xFFFF).to(tl.int16), mask)


@triton.jit
def _gradient(grad, at, mask, WIDE_GRAD: tl.constexpr):  # type: ignore[no-untyped-def]
    if WIDE_GRAD:
        return tl.load(grad + at, mask, 0.0)
    return (tl.load(grad + at, mask, 0).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _moments(g, m, v, lerp, beta2, square, SMALL: tl.constexpr):  # type: ignore[no-untyped-def]
    m = tl.fma(g - m, lerp, m) if SMALL else tl.fma(g - m, lerp, g)
    return m, tl.fma(square * g, g, v * beta2)


@triton.jit
def _after(before, m, v, decay, step, root, eps):  # type: ignore[no-untyped-def]
    denominator = tl.math.div_rn(tl.math.sqrt_rn(v), root) + eps
    return before * decay + tl.math.div_rn(m * step, denominator)


@triton.jit
def _place(table, chunks):  # type: ignore[no-untyped-def]
    """The row of this program's parameter, and which of its blocks this is; there may be fewer."""
    chunk = tl.program_id(0) // CHUNK
    row = table + tl.load(chunks + chunk) * WIDTH
    first = (chunk - tl.load(row)) * CHUNK
    return row, first + tl.program_id(0) % CHUNK


@triton.jit
def _pointer(row, index, TYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    pointer = tl.load(row + 4 + index).to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _size(row, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    size = tl.load(row + 2)
    return tl.multiple_of(size, 16) if ALIGNED else size


@triton.jit
def _three(  # type: ignore[no-untyped-def]
    row, KIND: tl.constexpr, WIDE_GRAD: tl.constexpr, ALIGNED: tl.constexpr
):
    """Weight, what completes it and gradient."""
    param = _pointer(row, 0, tl.float32 if KIND == FP32 else tl.int16, ALIGNED)
    extra = _pointer(row, 1, tl.float32 if KIND == MASTER else tl.int16, ALIGNED)
    grad = _pointer(row, 2, tl.float32 if WIDE_GRAD else tl.int16, ALIGNED)
    return param, extra, grad


@triton.jit
def _step8bit(  # type: ignore[no-untyped-def]
    table, chunks, tables, decay, lerp, beta2, square, step, root, eps,
    KIND: tl.constexpr, WIDE_GRAD: tl.constexpr, ALIGNED: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    row, index = _place(table, chunks)
    there = index < tl.load(row + 1)
    columns = _size(row, ALIGNED)
    nth, in_row = index.to(tl.int32), tl.load(row + 3).to(tl.int32)  # 64 bits divide slowly
    param, extra, grad = _three(row, KIND, WIDE_GRAD, ALIGNED)
    m_codes = _pointer(row, 3, tl.uint8, ALIGNED)
    m_scales = _pointer(row, 4, tl.float32, False) + index
    v_codes = _pointer(row, 5, tl.uint8, ALIGNED)
    v_scales = _pointer(row, 6, tl.float32, False) + index
    inside = nth % in_row * BLOCK + tl.arange(0, BLOCK)
    mask = (inside < columns) & there
    at = nth // in_row * columns + inside
    g = _gradient(grad, at, mask, WIDE_GRAD)
    code = tl.load(m_codes + at, mask, 0).to(tl.int32)
    magnitude = _value(code & 0x7F, tables)
    m = tl.where(code >= 128, -magnitude, magnitude) * tl.load(m_scales, there, 0.0)
    v = _value(tl.load(v_codes + at, mask, 0).to(tl.int32), tables + 40)
    v = v * tl.load(v_scales, there, 0.0)
    m, v = _moments(g, m, v, lerp, beta2, square, SMALL)
    before = _weight(param, extra, at, mask, KIND)
    _keep(param, extra, at, mask, _after(before, m, v, decay, step, root, eps), KIND)
    size = g.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    beyond = (v.to(tl.int32, bitcast=True) == 0x7F800000) & (size < 0x7F800000)
    within = tl.where(m > ROOT, ROOT, tl.where(m < -ROOT, -ROOT, m))  # NaN stays
    m, v = tl.where(beyond, within, m), tl.where(beyond, VAST, v)
    m_scale, m_inverse = _scale(m)
    v_scale, v_inverse = _scale(v)
    tl.store(m_scales, m_scale, there)
    tl.store(v_scales, v_scale, there)
    m, v = m * m_inverse, v * v_inverse
    n = _number(tl.abs(m), tables) | ((m.to(tl.int32, bitcast=True) >> 24) & 0x80)
    tl.store(m_codes + at, tl.where(m_inverse > 0, n, 0).to(tl.uint8), mask)
    n = tl.where(v_inverse > 0, _number(v, tables + 40), 0)
    tl.store(v_codes + at, n.to(tl.uint8), mask)


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    table, chunks, decay, lerp, beta2, square, step, root, eps,
    KIND: tl.constexpr, WIDE_GRAD: tl.constexpr, ALIGNED: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    row, index = _place(table, chunks)
    param, extra, grad = _three(row, KIND, WIDE_GRAD, ALIGNED)
    m_at = _pointer(row, 3, tl.float32, ALIGNED)
    v_at = _pointer(row, 4, tl.float32, ALIGNED)
    at = index * TILE + tl.arange(0, TILE)
    mask = at < _size(row, ALIGNED)
    g = _gradient(grad, at, mask, WIDE_GRAD)
    m, v = tl.load(m_at + at, mask, 0.0), tl.load(v_at + at, mask, 0.0)
    m, v = _moments(g, m, v, lerp, beta2, square, SMALL)
    before = _weight(param, extra, at, mask, KIND)
    _keep(param, extra, at, mask, _after(before, m, v, decay, step, root, eps), KIND)
    tl.store(m_at + at, m, mask)
    tl.store(v_at + at, v, mask)


class _Alike(NamedTuple):
    """What the parameters of one launch share."""

    place: torch.device
    coded: bool
    kind: int
    wide_grad: bool
    aligned: bool
    c: Coefficients


_Row = tuple[int, ...]


def step(problems: Sequence[Problem]) -> None:
    """As `reference.adamw` or `reference.adamw8bit` on each; tensors are contiguous."""
    launches: dict[_Alike, list[_Row]] = {}
    for problem in problems:
        if problem.param.numel():
            alike, row = _described(problem)
            launches.setdefault(alike, []).append(row)
    for alike, rows in launches.items():
        with torch.accelerator.device_index(alike.place.index):  # Triton takes the current one
            _launch(alike, rows)


def _described(problem: Problem) -> tuple[_Alike, _Row]:
    """What it shares with others, and its row of the table but for the first chunk."""
    param, extra, grad, state, c = problem
    addresses = [_address(x) for x in (param, param if extra is None else extra, grad, *state)]
    coded, size, in_row = len(state) == 4, param.numel(), 1
    blocks = -(-size // TILE.value)  # triton.cdiv takes the host 3 µs
    if coded:
        rows, in_row = state[1].shape
        blocks, size = rows * in_row, size // rows
    kind = 0 if param.dtype == torch.float32 else 1
    if extra is not None:
        kind = 2 if extra.dtype == torch.float32 else 3
    aligned = not any(number % 16 for number in (size, *addresses))
    alike = _Alike(param.device, coded, kind, grad.dtype == torch.float32, aligned, c)
    return alike, (blocks, size, in_row, *addresses)


def _launch(alike: _Alike, rows: list[_Row]) -> None:
    counts = tuple(-(-row[0] // CHUNK.value) for row in rows)
    firsts = accumulate((0, *counts))
    made = tuple((first, *row) for first, row in zip(firsts, rows, strict=False))
    stream = _stream(alike.place)
    more = (_tables(alike.place),) if alike.coded else ()
    kernel: Any = _step8bit if alike.coded else _step
    lerp = reference.rounded(alike.c.lerp)
    small = lerp < 0.5
    kernel[(sum(counts) * CHUNK.value,)](
        *(_table(made, alike.place, stream), _chunks(counts, alike.place, stream), *more),
        **alike.c._replace(lerp=lerp if small else lerp - 1)._asdict(),
        KIND=alike.kind,
        WIDE_GRAD=alike.wide_grad,
        ALIGNED=alike.aligned,
        SMALL=small,
        num_warps=4,
        enable_fp_fusion=False,  # only the fusions that the formula names
    )


# What is kept on the device belongs to the stream that it was written on.
@lru_cache(maxsize=32)
def _table(rows: tuple[_Row, ...], place: torch.device, stream: int) -> Tensor:
    padded = [(*row, *(0,) * (WIDTH.value - len(row))) for row in rows]
    return _sent(padded, torch.int64, place)


@lru_cache(maxsize=32)
def _chunks(counts: tuple[int, ...], place: torch.device, stream: int) -> Tensor:
    """The number of each chunk's row."""
    on_host = [(index, count) for index, count in enumerate(counts)]
    numbers, repeats = _sent(on_host, torch.int32, place).T
    return numbers.repeat_interleave(repeats, output_size=sum(counts))


def _sent(values: list[Any], dtype: torch.dtype, place: torch.device) -> Tensor:
    """On the device; the host does not wait, since what it copies from is pinned."""
    made = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=place.type != "cpu")
    return made.to(place, non_blocking=True)


def _stream(place: torch.device) -> int:
    return 0 if place.type == "cpu" else torch.accelerator.current_stream(place).stream_id


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr()


@cache
def _tables(place: torch.device) -> Tensor:
    return eight_bit.tables().to(place)
