"""AdamW on an accelerator: one Triton program a block of a row, or a tile of fp32 moments.

The arithmetic is `reference.py`'s, operation for operation. Weights and gradients in bf16 come as
their bits. Options come as arguments, since a tensor of them would have to be copied, and waited
for, at every launch. Needs the package triton, which torch's builds for accelerators bring.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lezero.ops.adamw import eight_bit, reference
from lezero.ops.adamw.reference import Coefficients

FP32, BF16, MASTER, REMAINDER = (tl.constexpr(kind) for kind in range(4))
BLOCK = tl.constexpr(eight_bit.BLOCK)
TILE = tl.constexpr(1024)
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
def _step8bit(  # type: ignore[no-untyped-def]
    param, extra, grad, m_codes, m_scales, v_codes, v_scales, tables, columns, in_row,
    decay, lerp, beta2, square, step, root, eps,
    KIND: tl.constexpr, WIDE_GRAD: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    inside = index % in_row * BLOCK + tl.arange(0, BLOCK)
    mask = inside < columns
    at = index // in_row * columns + inside
    g = _gradient(grad, at, mask, WIDE_GRAD)
    code = tl.load(m_codes + at, mask, 0).to(tl.int32)
    magnitude = _value(code & 0x7F, tables)
    m = tl.where(code >= 128, -magnitude, magnitude) * tl.load(m_scales + index)
    v = _value(tl.load(v_codes + at, mask, 0).to(tl.int32), tables + 40)
    v = v * tl.load(v_scales + index)
    m, v = _moments(g, m, v, lerp, beta2, square, SMALL)
    before = _weight(param, extra, at, mask, KIND)
    _keep(param, extra, at, mask, _after(before, m, v, decay, step, root, eps), KIND)
    m_scale, m_inverse = _scale(m)
    v_scale, v_inverse = _scale(v)
    tl.store(m_scales + index, m_scale)
    tl.store(v_scales + index, v_scale)
    m, v = m * m_inverse, v * v_inverse
    n = _number(tl.abs(m), tables) | ((m.to(tl.int32, bitcast=True) >> 24) & 0x80)
    tl.store(m_codes + at, tl.where(m_inverse > 0, n, 0).to(tl.uint8), mask)
    n = tl.where(v_inverse > 0, _number(v, tables + 40), 0)
    tl.store(v_codes + at, n.to(tl.uint8), mask)


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    param, extra, grad, m_at, v_at, numel,
    decay, lerp, beta2, square, step, root, eps,
    KIND: tl.constexpr, WIDE_GRAD: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < numel
    g = _gradient(grad, at, mask, WIDE_GRAD)
    m, v = tl.load(m_at + at, mask, 0.0), tl.load(v_at + at, mask, 0.0)
    m, v = _moments(g, m, v, lerp, beta2, square, SMALL)
    before = _weight(param, extra, at, mask, KIND)
    _keep(param, extra, at, mask, _after(before, m, v, decay, step, root, eps), KIND)
    tl.store(m_at + at, m, mask)
    tl.store(v_at + at, v, mask)


def adamw(
    param: Tensor, extra: Tensor | None, grad: Tensor, m: Tensor, v: Tensor, c: Coefficients
) -> None:
    """As `reference.adamw`, on contiguous tensors of one device."""
    if not param.numel():
        return
    launch: Any = _step[(triton.cdiv(param.numel(), TILE.value),)]
    with torch.accelerator.device_index(param.device.index):  # Triton takes the current one
        launch(*_bits(param, extra, grad), m, v, param.numel(), **_options(param, extra, grad, c))


def adamw8bit(
    param: Tensor,
    extra: Tensor | None,
    grad: Tensor,
    m_codes: Tensor,
    m_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    c: Coefficients,
) -> None:
    """As `reference.adamw8bit`, on contiguous tensors of one device."""
    rows, in_row = m_scales.shape
    launch: Any = _step8bit[(rows * in_row,)]
    with torch.accelerator.device_index(param.device.index):
        launch(
            *(*_bits(param, extra, grad), m_codes, m_scales, v_codes, v_scales),
            *(_tables(param.device), param.numel() // rows, in_row),
            **_options(param, extra, grad, c),
        )


def _options(param: Tensor, extra: Tensor | None, grad: Tensor, c: Coefficients) -> dict[str, Any]:
    lerp = reference.rounded(c.lerp)
    small = lerp < 0.5
    kind = 0 if param.dtype == torch.float32 else 1
    if extra is not None:
        kind = 2 if extra.dtype == torch.float32 else 3
    return {
        **c._replace(lerp=lerp if small else lerp - 1)._asdict(),
        "KIND": kind,
        "WIDE_GRAD": grad.dtype == torch.float32,
        "SMALL": small,
        "num_warps": 4,
        "enable_fp_fusion": False,  # only the fusions that the formula names
    }


@cache
def _tables(place: torch.device) -> Tensor:
    return eight_bit.tables().to(place)


def _bits(param: Tensor, extra: Tensor | None, grad: Tensor) -> tuple[Tensor, ...]:
    """Weight, what completes it and gradient, those in bf16 as their bits."""
    three = (param, param if extra is None else extra, grad)
    return tuple(x.view(torch.int16) if x.dtype == torch.bfloat16 else x for x in three)
