"""What every method must do; the tests of a new one inherit `MethodConformance`."""

from __future__ import annotations

import pytest
import torch

from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.methods import Method
from lezero.ops.quantize import Grid, dequantize, quantize

GRIDS = [
    Grid("int4", 32, True, "fp16"),
    Grid("int4", 32),
    Grid("int8"),
    Grid("int8", 32, True),
    Grid("int8", "tensor"),
    Grid("int8", "tensor", True),
    Grid("nf4", 32),
]


def inputs_of(*batches: torch.Tensor) -> Inputs:
    inputs = Inputs("layer", image=False, hessian=True)
    for x_MK in batches:
        inputs.add(x_MK)
    return inputs


class MethodConformance:
    method: type[Method]

    @pytest.mark.parametrize("grid", GRIDS, ids=str)
    def test_codes_are_on_the_grid_and_near(self, grid):
        if not self.method().suits(grid):
            return
        made = torch.Generator().manual_seed(0)
        w, x = torch.randn(24, 96, generator=made), torch.randn(200, 96, generator=made)
        x[:, 5] = 0
        result = self.method().codes(w.clone(), grid, "minmax", inputs_of(x))
        assert result.codes.shape == w.shape
        assert result.codes.dtype == grid.code_dtype
        assert tuple(result.scale.shape) == grid.scale_shape(w.shape)
        assert (result.zero is not None) == grid.zero_point
        plain = dequantize(*quantize(w, grid), grid)
        found = dequantize(*result, grid)

        def error(weight):
            return float((x @ (weight - w).T).norm())

        assert error(found) <= 1.15 * error(plain)

    def test_a_weight_of_zeros_stays_one(self):
        grid = GRIDS[0]
        w, x = torch.zeros(8, 64), torch.randn(50, 64)
        found = dequantize(*self.method().codes(w, grid, "minmax", inputs_of(x)), grid)
        assert (found == 0).all()

    def test_inputs_that_are_all_zero_do_not_break_it(self):
        w = torch.randn(8, 64)
        result = self.method().codes(w, GRIDS[0], "minmax", inputs_of(torch.zeros(50, 64)))
        assert torch.isfinite(dequantize(*result, GRIDS[0])).all()
