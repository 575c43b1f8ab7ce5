"""Moments in 8 bits: a dynamic code for each element and a scale for each block of a row.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021), arXiv:2110.02861: blocks as
in section 2.1, the dynamic code as in sections 1.3 (signed) and 2.2 (unsigned: second moment).

[Note: the code]
A magnitude's number n has its leading 1 at bit d, the decade, and what follows counts evenly spaced
cells inside it: with D decades (7 with a sign, 8 without), decade d is 10^(d-D+1) · [0.1, 1] in 2^d
equal cells, and an element takes the middle of the cell that it lies in. n = 0 is zero. Three
differences from the paper: values are scaled so that the largest is exactly 1 and the block's
largest element is kept exactly; without a sign the spare code is one more decade at the bottom; and
without a sign nothing is rounded to zero, since a second moment of 0 under a first that is not 0
gives an unbounded step (the zero-point problem of Li et al., "Memory Efficient Optimizers with
4-bit States" (2023), arXiv:2309.01507).

[Note: blocks]
A parameter is seen as (rows, columns): its first dim and all others. A block is up to 256
neighbouring elements of one row, so no block is ever cut when rows are shared among ranks. Codes
have the parameter's shape; scales have (rows, blocks in a row). Dim 0 of every state tensor is
dim 0 of the parameter.

[Note: not finite]
A block that would hold a NaN or an infinity gets the scale NaN and decodes to NaN in every element:
the damage stays visible, and is never more than the block. A second moment that overflows by a
finite gradient (above 1e21) is kept as `VAST` instead, and a first moment beyond its root as that,
so that the step stays one of AdamW. A block whose largest magnitude is below 2^-126 is stored as
zeros.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

BLOCK = 256
LEAST_ELEMENTS, LEAST_COLUMNS = 4096, 64
_DECADES = 8
_NORMAL = 2.0**-126
VAST = 2.0**126
"""The largest scale whose inverse is a normal number."""


def suits(shape: torch.Size) -> bool:
    """False for a parameter too small to gain: fewer than 4096 elements, rows shorter than 64."""
    elements = shape.numel()
    return elements >= LEAST_ELEMENTS and elements // shape[0] >= LEAST_COLUMNS


def scales_shape(shape: torch.Size) -> tuple[int, int]:
    """(rows, blocks in a row) of a parameter, or of a part of its rows."""
    columns = 1
    for size in shape[1:]:
        columns *= size
    return shape[0], -(-columns // BLOCK)


@cache
def tables() -> Tensor:
    """(2, 5, 8) fp32: with and without sign; thresholds, and the lines `x · up + up_from` from
    values to numbers and `n · down + down_from` back, exact in fp32, of each decade."""
    return torch.tensor([_decades(7), _decades(8)], dtype=torch.float32, device="cpu")


def _decades(count: int) -> list[list[float]]:
    top = 0.1 + 0.9 * (1 - 0.5**count)  # of the largest cell's middle, before it becomes 1
    columns = []
    for decade in range(count):
        cells, unit = 2**decade, 10.0 ** (decade - count + 1) / top
        spacing = _short(0.9 * unit / cells)
        # On the grid of the spacing's last bit, so that sums are exact.
        first = round((0.1 + 0.45 / cells) * unit / _unit(spacing)) * _unit(spacing)
        if decade == count - 1:
            first = 1 - (cells - 1) * spacing
        # The lowest decade is one cell. Without a sign everything below belongs to it too.
        threshold = 0.0 if decade == 0 and count == 8 else first - spacing / 2
        up = 1 / spacing if decade else 0.0
        columns.append([threshold, up, cells - first * up, spacing, first - cells * spacing])
    columns += [[math.inf, 0.0, 0.0, 0.0, 0.0]] * (_DECADES - count)
    return [list(row) for row in zip(*columns, strict=True)]


def _unit(x: float) -> float:
    """What the last of the 16 leading bits of x is worth."""
    return 2.0 ** (math.frexp(x)[1] - 16)


def _short(x: float) -> float:
    return round(x / _unit(x)) * _unit(x)


def encode(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """fp32 (rows, columns) → uint8 codes (rows, columns), fp32 scales (rows, blocks in a row)."""
    blocks = _in_blocks(values)
    most = blocks.abs().amax(2)
    finite = torch.isfinite(blocks).all(2)
    scale = torch.where(most < _NORMAL, 0.0, most)
    inverse = torch.where(finite & (scale > 0), 1.0 / scale, 0.0)
    scale = torch.where(finite, scale, torch.nan)
    scaled = torch.where(finite[..., None], blocks, 0.0) * inverse[..., None]
    codes = numbers(scaled.abs(), signed)
    if signed:
        codes = codes | (torch.signbit(scaled).to(torch.uint8) << 7)
    codes = torch.where(inverse[..., None] > 0, codes, 0)
    return codes.flatten(1)[:, : values.shape[1]].contiguous(), scale


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """What `encode` gave → fp32 (rows, columns)."""
    found = values_of(codes & 0x7F if signed else codes, signed)
    if signed:
        found = torch.where(codes >= 0x80, -found, found)
    wide = scales.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    return found * wide


def numbers(x: Tensor, signed: bool) -> Tensor:
    """Magnitudes between 0 and 1 → the number of the cell that each lies in, uint8."""
    threshold, up, up_from, _, _ = tables()[0 if signed else 1].to(x.device)
    decade = sum((x >= bound).long() for bound in threshold[1:])
    assert isinstance(decade, Tensor)
    n = (x * up[decade] + up_from[decade]).round()
    return torch.where(x >= threshold[0], n, 0.0).to(torch.uint8)


def values_of(n: Tensor, signed: bool) -> Tensor:
    """Numbers (uint8) → magnitudes between 0 and 1, fp32."""
    *_, down, down_from = tables()[0 if signed else 1].to(n.device)
    decade = sum((n >= 2**bit).long() for bit in range(1, _DECADES))
    assert isinstance(decade, Tensor)
    return torch.where(n > 0, n.float() * down[decade] + down_from[decade], 0.0)


def _in_blocks(values: Tensor) -> Tensor:
    rows, columns = values.shape
    blocks = -(-columns // BLOCK)
    padded = values.new_zeros(rows, blocks * BLOCK)
    padded[:, :columns] = values
    return padded.view(rows, blocks, BLOCK)
