"""Half-quadratic quantization: better zero points without data."""

from __future__ import annotations

import torch
from torch import Tensor

from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.methods.method import Method, methods
from lezero.compress.quantize.observers.scales import (
    grouped_columns,
    some_rows,
    weight_scale,
)
from lezero.ops.grid_fit import half_quadratic
from lezero.ops.quantize import Grid, Quantized
from lezero.ops.quantize.grid import SCALE_DTYPES

_ROUNDS = 20


@methods.register("hqq")
class HQQ(Method):
    """Zero points that make the error sparse: most weights nearly right, outliers wrong.

    Badri and Shaji, 2023, "Half-Quadratic Quantization of Large Machine Learning Models"
    (mobiusml.github.io/hqq_blog): minimises ‖W - Q⁻¹(Q(W))‖_p with p = 0.7 over the zero points by
    half-quadratic splitting; equations at `ops.grid_fit.half_quadratic`. Zero points come out
    fractional, which the kernels take.
    """

    def suits(self, grid: Grid) -> bool:
        return grid.zero_point

    def codes(self, w_NK: Tensor, grid: Grid, rule: str, inputs: Inputs | None) -> Quantized:
        if grid.group == "tensor":
            return self._codes(w_NK, grid, rule)
        parts = [self._codes(part, grid, rule) for part in some_rows(w_NK)]
        zeros = [part.zero for part in parts if part.zero is not None]
        codes = torch.cat([part.codes for part in parts])
        return Quantized(codes, torch.cat([part.scale for part in parts]), torch.cat(zeros))

    def _codes(self, w_NK: Tensor, grid: Grid, rule: str) -> Quantized:
        scale, zero = weight_scale(w_NK, grid, rule)
        assert zero is not None
        codes, zeros = [], []
        for columns, own in grouped_columns(w_NK.shape[1], grid):
            found = half_quadratic(
                *(columns(w_NK), scale[:, own].flatten(), zero[:, own].flatten()),
                code_range=grid.code_range,
                kept=SCALE_DTYPES[grid.scale_dtype],
                rounds=_ROUNDS,
            )
            codes.append(found[0].view(len(w_NK), -1))
            zeros.append(found[1].view(len(scale), -1))
        return Quantized(torch.cat(codes, 1), scale, torch.cat(zeros, 1))
