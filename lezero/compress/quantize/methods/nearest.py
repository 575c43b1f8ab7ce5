"""Each weight by itself."""

from __future__ import annotations

from torch import Tensor

from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.methods.method import Method, methods
from lezero.compress.quantize.observers.scales import weight_scale
from lezero.ops.quantize import Grid, Quantized, quantize


@methods.register("nearest")
class Nearest(Method):
    """Every weight becomes the nearest point of its group's grid (Nagel et al., 2021, "A White
    Paper on Neural Network Quantization", arXiv:2106.08295, equations 4 to 7)."""

    def codes(self, w_NK: Tensor, grid: Grid, rule: str, inputs: Inputs | None) -> Quantized:
        importance = None if inputs is None else inputs.mean_square
        scale, zero = weight_scale(w_NK, grid, rule, importance)
        return quantize(w_NK, grid, scale=scale, zero=zero)
