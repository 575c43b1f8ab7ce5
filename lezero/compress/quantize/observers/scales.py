"""Scales of weights: the range of each group by one of the observers' rules.

With all values at hand no histogram is needed for "mse" and "percentile": the errors of 20 to 50
candidates are computed as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from lezero.compress.quantize.observers.observer import observers
from lezero.compress.quantize.parts import at_once
from lezero.ops.grid_fit import least_error
from lezero.ops.quantize import Grid, find_scale, nearest_points
from lezero.ops.quantize.grid import LEVELS, SCALE_DTYPES

RULES_OF_GROUPS = ("minmax", "mse")
"""What says which range a group's scale covers; others need as many values as a row has."""
_STEPS, _LEAST_KEPT = 20, 0.5


def weight_scale(
    w_NK: Tensor, grid: Grid, rule: str, importance_K: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point (fp32, `grid.scale_shape`) of each group of a weight.

    rule: "minmax", "mse", or another observer's name, whose range then counts. It sees rows
    together, each in units of its largest weight, since one by itself has too few values for a
    histogram. For grids of groups it is one of `RULES_OF_GROUPS`.
    `importance_K`: how much the error at each input counts for "mse"; the mean square of the
    inputs makes it the expected error of the outputs, were inputs independent.
    """
    if grid.group == "tensor":
        return _scale(w_NK.float(), grid, rule, importance_K)
    found = [_scale(part.float(), grid, rule, importance_K) for part in some_rows(w_NK)]
    zeros = [zero for _, zero in found if zero is not None]
    return torch.cat([scale for scale, _ in found]), torch.cat(zeros) if zeros else None


def some_rows(w_NK: Tensor) -> tuple[Tensor, ...]:
    """The rows of a matrix in parts that are worked on at once."""
    return w_NK.split(max(1, at_once(w_NK.device) // max(1, w_NK.shape[1])))


def _scale(
    w_NK: Tensor, grid: Grid, rule: str, importance_K: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    assert not isinstance(grid.group, int) or rule in RULES_OF_GROUPS, rule
    if rule == "minmax":
        return find_scale(w_NK, grid)
    if rule == "mse":
        return _least_error(w_NK, grid, importance_K)
    x_CN = w_NK.reshape(1, -1) if grid.group == "tensor" else w_NK
    most = x_CN.abs().amax(1, keepdim=True)
    observer = observers.get(rule)()
    observer.observe((x_CN / most.clamp(min=torch.finfo(torch.float32).tiny)).reshape(1, -1))
    seen = observer.range(1 << grid.bits, symmetric=not grid.zero_point)
    bounds = [bound.to(w_NK.device) * most for bound in seen]
    low = torch.maximum(bounds[0], x_CN.amin(1, keepdim=True).clamp(max=0.0))
    high = torch.minimum(bounds[1], x_CN.amax(1, keepdim=True).clamp(min=0.0))
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
    scale, zero = find_scale(w_NK, grid)
    parts = []
    for columns, own in grouped_columns(w_NK.shape[1], grid):
        w_GE, scale_G = columns(w_NK), scale[:, own].flatten()
        importance = None if importance_K is None else columns(importance_K.expand_as(w_NK))
        if grid.is_integer:
            low, high = (code - grid.middle for code in grid.code_range)
            # A zero point in codes stays where it is when both ends of a range move in proportion.
            found = least_error(
                *(w_GE, scale_G, None if zero is None else zero[:, own].flatten()),
                code_range=(low, high),
                kept=SCALE_DTYPES[grid.scale_dtype],
                steps=_STEPS,
                importance_GE=importance,
            )
        else:
            found = _least_error_of_points(w_GE, scale_G, grid, importance)
        parts.append(found.view(len(scale), -1))
    return torch.cat(parts, 1), zero


def _least_error_of_points(
    w_GE: Tensor, scale_G: Tensor, grid: Grid, importance_GE: Tensor | None
) -> Tensor:
    """`least_error` where points do not lie at equal steps: fp8 and nf4."""
    grid = replace(grid, group="row")
    best, best_scale = torch.full_like(scale_G, torch.inf), scale_G
    for step in range(_STEPS):
        share = 1 - (1 - _LEAST_KEPT) * step / _STEPS
        tried = (scale_G * share).to(SCALE_DTYPES[grid.scale_dtype]).float()
        wrong = nearest_points(w_GE, grid, tried[:, None], None).sub_(w_GE).square_()
        error = (wrong if importance_GE is None else wrong.mul_(importance_GE)).sum(1)
        better = error < best
        best, best_scale = torch.where(better, error, best), torch.where(better, tried, best_scale)
    return best_scale


def grouped_columns(K: int, grid: Grid) -> Iterator[tuple[Callable[[Tensor], Tensor], slice]]:
    """Groups of one length at a time, as the last of a row may be shorter: what makes (groups,
    elements) of a matrix of K columns, and which groups of a row they are."""

    def columns(x_NK: Tensor, first: int, last: int, each: int) -> Tensor:
        return x_NK[:, first:last].reshape(-1, each)

    if grid.group == "tensor":
        yield (lambda x: x.reshape(1, -1)), slice(0, 1)
        return
    size = grid.group if isinstance(grid.group, int) else K
    for first, last in pairwise(sorted({0, K // size * size, K})):
        own = slice(first // size, -(-last // size))
        yield partial(columns, first=first, last=last, each=min(size, last - first)), own


def storable(grid: Grid, scale: Tensor) -> Grid:
    """`grid`, with fp32 scales where fp16 would lose those found with `scale_dtype="fp32"`."""
    used = scale[scale > 0]
    fits = not used.numel() or (used.min() >= 2.0**-20 and used.max() <= 6e4)
    return grid if fits else replace(grid, scale_dtype="fp32")
