"""Quantize and dequantize in groups: codes of one element each, with scales and zero points.

For each group of elements x, with L the format's highest level:

    symmetric        s = |x|max / L; code = clamp(round(x / s)), halves to even
    with zero point  s = (max(x, 0) - min(x, 0)) / (codes - 1); z = round(-min(x, 0) / s);
                     code = clamp(round(x / s + z))
    fp8              code = x / s as float8_e4m3fn, nearest, with L = 448 (arXiv:2209.05433)
    nf4              code = the number of the nearest of nf4's 16 values to x / s, with L = 1

and back: (code - z) · s. Symmetric codes of int4 are counted from 0: 8 is added once they are
rounded, and z is 8. x / s is computed as x · (1 / s), in fp32.

[Note: values that are not finite]
A group that holds one gets the scale NaN and decodes to NaN, never to something finite. A group of
zeros has the scale 0 and decodes to zeros, and so does one whose scale would be so small that 1 / s
overflows.

[Note: scales that are not held]
A scale that `scale_dtype` rounds to an infinity (fp16: 65,520 and more) becomes NaN, and its group
decodes to NaN, however finite it is; one that it rounds to 0 (fp16: 2⁻²⁵ and less) becomes 0, and
its group zeros. Callers whose values may be so large or so small take fp32 scales for them, as
`storable` of `lezero.compress` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.quantize.grid import LEVELS, NF4, SCALE_DTYPES, Grid

_LEAST = 2.0**-126


class Quantized(NamedTuple):
    """`codes`: the shape of what was quantized, dtype `grid.code_dtype`. `scale`, `zero` (fp32):
    `grid.scale_shape` of it; `zero` is None without zero points."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None


def quantize(
    x: Tensor, grid: Grid, *, scale: Tensor | None = None, zero: Tensor | None = None
) -> Quantized:
    """Codes of `x` (floats, at least one dim) on `grid`.

    `scale` and `zero`, of `grid.scale_shape(x.shape)`, come from `find_scale` unless given (by a
    calibration, GPTQ, HQQ: then `zero` need not be whole). Raises `ConfigError` for other shapes.
    """
    _check(x, grid)
    if scale is None:
        scale, zero = find_scale(x, grid)
    for name, given in (("scale", scale), ("zero", zero)):
        if given is not None and tuple(given.shape) != grid.scale_shape(x.shape):
            raise ConfigError(
                f"quantize: {name} has shape {tuple(given.shape)}; for values of "
                f"{tuple(x.shape)} it is {grid.scale_shape(x.shape)}"
            )
    if (zero is not None) != grid.zero_point:
        raise ConfigError("quantize: zero points are given exactly where the grid has them")
    scale = scale.float()
    scaled = _by_group(torch.mul, x.float(), _inverse(scale), grid)
    return Quantized(_codes(scaled, zero, grid), scale, None if zero is None else zero.float())


def dequantize(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    grid: Grid,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values that `codes` stand for, computed in fp32, in `dtype`; the shape of `codes`."""
    if grid.format == "nf4":
        table = torch.tensor(NF4, dtype=torch.float32, device=codes.device)
        wide = table[codes.long()]
    else:
        wide = codes.float()
    if zero is not None:
        wide = _by_group(Tensor.sub_, wide, zero.float(), grid)
    elif grid.middle:
        wide = wide.sub_(grid.middle)
    return _by_group(Tensor.mul_, wide, scale.float(), grid).to(dtype)


def nearest_points(x: Tensor, grid: Grid, scale: Tensor, zero: Tensor | None) -> Tensor:
    """What finite fp32 values become, `dequantize(*quantize(x, grid, scale, zero), grid)` bit for
    bit, without the codes."""
    if not grid.is_integer:
        return dequantize(*quantize(x, grid, scale=scale, zero=zero), grid)
    points = _by_group(torch.mul, x, _inverse(scale), grid)
    # Codes know no -0, which adding 0 turns into 0.
    if zero is not None:
        _by_group(Tensor.add_, points, zero, grid)
        points.round_().clamp_(*grid.code_range).add_(0.0)
        _by_group(Tensor.sub_, points, zero, grid)
    else:
        low, high = (code - grid.middle for code in grid.code_range)
        points.round_().clamp_(low, high).add_(0.0)
    return _by_group(Tensor.mul_, points, scale, grid)


def find_scale(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points (fp32, of `grid.scale_shape`) from each group's extremes."""
    groups = _in_groups(x.float(), grid)
    if not groups.numel():
        empty = x.new_zeros(grid.scale_shape(x.shape), dtype=torch.float32)
        return empty, empty.clone() if grid.zero_point else None
    # Extremes take NaN and Inf on, so a group is finite when they are.
    if grid.zero_point:
        low = groups.amin(-1).clamp(max=0.0)
        high = groups.amax(-1).clamp(min=0.0)
        finite = torch.isfinite(low) & torch.isfinite(high)
        # Halved first, so that the range of huge values does not overflow.
        exact = (high / 2 - low / 2) / (grid.code_range[1] / 2)
    else:
        low, most = None, groups.abs().amax(-1)
        finite, exact = torch.isfinite(most), most / LEVELS[grid.format]
    scale = exact.to(SCALE_DTYPES[grid.scale_dtype]).float()
    scale = torch.where(scale < _LEAST, 0.0, scale)
    scale = torch.where(finite & torch.isfinite(scale), scale, torch.nan)
    zero = None
    if low is not None:
        zero = torch.where(scale > 0, torch.round(-low / scale), 0.0)
        zero = zero.clamp(*grid.code_range).view(grid.scale_shape(x.shape))
    return scale.view(grid.scale_shape(x.shape)), zero


def _codes(scaled: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
    """The codes of values over their scale; `scaled` is overwritten."""
    if grid.format == "fp8":
        return scaled.nan_to_num(0.0).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    if grid.format == "nf4":
        table = torch.tensor(NF4, dtype=torch.float32, device=scaled.device)
        scaled = scaled.nan_to_num(0.0).contiguous()  # else bucketize warns and copies
        return torch.bucketize(scaled, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    if zero is not None:
        scaled = _by_group(Tensor.add_, scaled, zero.float(), grid)
    scaled.round_()
    if grid.middle:
        scaled.add_(grid.middle)
    return scaled.nan_to_num_(0.0).clamp_(*grid.code_range).to(grid.code_dtype)


def _inverse(scale: Tensor) -> Tensor:
    usable = torch.isfinite(scale) & (scale.abs() >= _LEAST)
    return torch.where(usable, 1 / scale, 0.0)


def _check(x: Tensor, grid: Grid) -> None:
    if not x.is_floating_point() or x.dim() == 0:
        raise ConfigError(
            f"quantize: got {x.dtype} {tuple(x.shape)}; allowed are floats of at least one dim"
        )


def _group_size(columns: int, grid: Grid) -> int:
    return columns if grid.group == "row" else int(grid.group)


def _in_groups(x: Tensor, grid: Grid) -> Tensor:
    """(…, groups, elements); a short last group is filled with zeros, which change no scale."""
    if grid.group == "tensor":
        return x.reshape(1, -1)
    size = max(1, _group_size(x.shape[-1], grid))
    missing = -x.shape[-1] % size
    padded = torch.nn.functional.pad(x, (0, missing)) if missing else x
    return padded.unflatten(-1, (-1, size)) if padded.shape[-1] else padded[..., None]


def _by_group(
    operation: Callable[[Tensor, Tensor], Tensor], x: Tensor, per_group: Tensor, grid: Grid
) -> Tensor:
    """`operation` on each element and the number of its group; in place where that is."""
    if grid.group in ("row", "tensor"):
        return operation(x, per_group)
    size = int(grid.group)
    if x.numel() and x.shape[-1] % size == 0:
        return operation(x.unflatten(-1, (-1, size)), per_group[..., None]).flatten(-2)
    return operation(x, per_group.repeat_interleave(size, -1)[..., : x.shape[-1]])
