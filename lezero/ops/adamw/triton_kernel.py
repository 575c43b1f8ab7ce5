"""AdamW with moments in 8 bits on an accelerator: one Triton program a block of a row.

The arithmetic is `reference.py`'s, operation for operation. Weights and gradients in bf16 come as
their bits. Needs the package triton, which torch's builds for accelerators bring.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lezero.ops.adamw import eight_bit
from lezero.ops.adamw.reference import Coefficients

FP32, BF16, MASTER, REMAINDER = (tl.constexpr(kind) for kind in range(4))
BLOCK = tl.constexpr(eight_bit.BLOCK)
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
def _step(  # type: ignore[no-untyped-def]
    param,
    extra,
    grad,
    m_codes,
    m_scales,
    v_codes,
    v_scales,
    tables,
    options,
    columns,
    in_row,
    KIND: tl.constexpr,
    WIDE_GRAD: tl.constexpr,
    SMALL: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    inside = index % in_row * BLOCK + tl.arange(0, BLOCK)
    mask = inside < columns
    at = index // in_row * columns + inside
    decay, lerp, beta2 = tl.load(options), tl.load(options + 1), tl.load(options + 2)
    square, step = tl.load(options + 3), tl.load(options + 4)
    root, eps = tl.load(options + 5), tl.load(options + 6)
    if WIDE_GRAD:
        g = tl.load(grad + at, mask, 0.0)
    else:
        g = (tl.load(grad + at, mask, 0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    code = tl.load(m_codes + at, mask, 0).to(tl.int32)
    magnitude = _value(code & 0x7F, tables)
    m = tl.where(code >= 128, -magnitude, magnitude) * tl.load(m_scales + index)
    v = _value(tl.load(v_codes + at, mask, 0).to(tl.int32), tables + 40)
    v = v * tl.load(v_scales + index)
    m = tl.fma(g - m, lerp, m) if SMALL else tl.fma(g - m, lerp, g)
    v = tl.fma(square * g, g, v * beta2)
    denominator = tl.math.div_rn(tl.math.sqrt_rn(v), root) + eps
    before = _weight(param, extra, at, mask, KIND)
    after = before * decay + tl.math.div_rn(m * step, denominator)
    _keep(param, extra, at, mask, after, KIND)
    m_scale, m_inverse = _scale(m)
    v_scale, v_inverse = _scale(v)
    tl.store(m_scales + index, m_scale)
    tl.store(v_scales + index, v_scale)
    m, v = m * m_inverse, v * v_inverse
    n = _number(tl.abs(m), tables) | ((m.to(tl.int32, bitcast=True) >> 24) & 0x80)
    tl.store(m_codes + at, tl.where(m_inverse > 0, n, 0).to(tl.uint8), mask)
    n = tl.where(v_inverse > 0, _number(v, tables + 40), 0)
    tl.store(v_codes + at, n.to(tl.uint8), mask)


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
    small = c.lerp < 0.5
    options = torch.tensor(c._replace(lerp=c.lerp if small else c.lerp - 1), dtype=torch.float32)
    kind = 0 if param.dtype == torch.float32 else 1
    if extra is not None:
        kind = 2 if extra.dtype == torch.float32 else 3
    rows, in_row = m_scales.shape
    launch: Any = _step[(rows * in_row,)]
    with torch.accelerator.device_index(param.device.index):  # Triton takes the current one
        launch(
            *(_plain(x) for x in (param, param if extra is None else extra, grad)),
            *(m_codes, m_scales, v_codes, v_scales),
            eight_bit.tables().to(param.device),
            options.to(param.device),
            param.numel() // rows,
            in_row,
            KIND=kind,
            WIDE_GRAD=grad.dtype == torch.float32,
            SMALL=small,
            num_warps=4,
            enable_fp_fusion=False,  # only the fusions that the formula names
        )


def _plain(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
