"""Scales of weights: the range of each group by one of the observers' rules.

With all values at hand no histogram is needed for "mse" and "percentile": the errors of 20 to 50
candidates are computed as they are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lezero.compress.quantize.observers.observer import observers
from lezero.ops.quantize import Grid, dequantize, find_scale, quantize
from lezero.ops.quantize.grid import LEVELS, SCALE_DTYPES

_LEAST_KEPT = 0.5
_STEPS = 20
_ROWS = 1 << 22


def weight_scale(
    w_NK: Tensor, grid: Grid, rule: str, importance_K: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point (fp32, `grid.scale_shape`) of each group of a weight.

    rule: "minmax", "mse", or another observer's name, whose range of a row or tensor then counts
    (for grids of groups, whose few values have no distribution, these are as "minmax").
    `importance_K`: how much the error at each input counts for "mse"; the mean square of the
    inputs makes it the expected error of the outputs, were inputs independent.
    """
    if rule == "minmax" or (isinstance(grid.group, int) and rule != "mse"):
        return find_scale(w_NK, grid)
    if rule == "mse":
        return _least_error(w_NK, grid, importance_K)
    x_CN = w_NK.reshape(1, -1) if grid.group == "tensor" else w_NK
    parts = []
    for part in x_CN.split(max(1, _ROWS // max(1, x_CN.shape[1]))):
        observer = observers.get(rule)(len(part))
        observer.observe(part)
        parts.append(observer.range(1 << grid.bits))
    low, high = (torch.cat(bounds)[:, None].to(w_NK.device) for bounds in zip(*parts, strict=True))
    return scale_of_range(low, high, grid)


def scale_of_range(low: Tensor, high: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point that cover low … high (low ≤ 0 ≤ high)."""
    if grid.zero_point:
        exact = (high - low) / grid.code_range[1]
    else:
        exact = torch.maximum(high, -low) / LEVELS[grid.format]
    scale = exact.float().to(SCALE_DTYPES[grid.scale_dtype]).float()
    if not grid.zero_point:
        return scale, None
    zero = torch.where(scale > 0, torch.round(-low / scale), 0.0).clamp(*grid.code_range)
    return scale, zero


def _least_error(
    w_NK: Tensor, grid: Grid, importance_K: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """For each group the share of its range, from 1 down to a half, with the least error."""
    best_scale, best_zero = find_scale(w_NK, grid)
    best = _group_errors(w_NK, grid, best_scale, best_zero, importance_K)
    full = best_scale
    kept = SCALE_DTYPES[grid.scale_dtype]
    for step in range(1, _STEPS):
        scale = (full * (1 - (1 - _LEAST_KEPT) * step / _STEPS)).to(kept).float()
        # A zero point in codes stays where it is when both ends of a range move in proportion.
        error = _group_errors(w_NK, grid, scale, best_zero, importance_K)
        better = error < best
        best = torch.where(better, error, best)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale, best_zero


def _group_errors(
    w_NK: Tensor, grid: Grid, scale: Tensor, zero: Tensor | None, importance_K: Tensor | None
) -> Tensor:
    errors = []
    rows = max(1, _ROWS // w_NK.shape[1])
    whole = grid.group == "tensor"
    for first in range(0, len(w_NK), rows):
        part = w_NK[first : first + rows].float()
        own = slice(None) if whole else slice(first, first + rows)
        s, z = scale[own], None if zero is None else zero[own]
        codes = quantize(part, grid, scale=s, zero=z)
        wrong = (dequantize(*codes, grid) - part).square()
        if importance_K is not None:
            wrong *= importance_K
        errors.append(_sum_groups(wrong, grid))
    return torch.stack(errors).sum(0) if whole else torch.cat(errors)


def _sum_groups(x_NK: Tensor, grid: Grid) -> Tensor:
    if grid.group == "tensor":
        return x_NK.sum().reshape(1, 1)
    if grid.group == "row":
        return x_NK.sum(1, keepdim=True)
    size = int(grid.group)
    padded = torch.nn.functional.pad(x_NK, (0, -x_NK.shape[1] % size))
    return padded.unflatten(1, (-1, size)).sum(2)


def storable(grid: Grid, scale: Tensor) -> Grid:
    """`grid`, with fp32 scales where fp16 would lose those found with `scale_dtype="fp32"`."""
    if grid.scale_dtype != "fp16":
        return grid
    used = scale[scale > 0]
    fits = not used.numel() or (used.min() >= 2.0**-20 and used.max() <= 6e4)
    return grid if fits else replace(grid, scale_dtype="fp32")
