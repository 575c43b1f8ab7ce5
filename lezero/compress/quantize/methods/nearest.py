"""Each weight by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.methods.method import Method, methods
from lezero.compress.quantize.observers.scales import some_rows, weight_scale
from lezero.ops.quantize import Grid, Quantized, quantize


@methods.register("nearest")
class Nearest(Method):
    """Every weight becomes the nearest point of its group's grid (Nagel et al., 2021, "A White
    Paper on Neural Network Quantization", arXiv:2106.08295, equations 4 to 7)."""

    def codes(self, w_NK: Tensor, grid: Grid, rule: str, inputs: Inputs | None) -> Quantized:
        importance = None if inputs is None else inputs.importance
        scale, zero = weight_scale(w_NK, grid, rule, importance)
        return rounded(w_NK, grid, scale, zero)


def rounded(w_NK: Tensor, grid: Grid, scale: Tensor, zero: Tensor | None) -> Quantized:
    """The nearest codes for given scales and zero points, some rows at a time."""
    if grid.group == "tensor":
        return quantize(w_NK, grid, scale=scale, zero=zero)
    codes, first = [], 0
    for part in some_rows(w_NK):
        own = slice(first, first + len(part))
        given = None if zero is None else zero[own]
        codes.append(quantize(part, grid, scale=scale[own], zero=given).codes)
        first += len(part)
    return Quantized(torch.cat(codes), scale, zero)
