"""Half-quadratic quantization: better zero points without data."""

from __future__ import annotations

import torch
from torch import Tensor

from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.methods.method import Method, methods
from lezero.compress.quantize.observers.scales import some_rows, weight_scale
from lezero.ops.quantize import Grid, Quantized, dequantize, quantize
from lezero.ops.quantize.grid import SCALE_DTYPES

_NORM = 0.7
_BETA, _GROWTH = 10.0, 1.01
_ROUNDS = 20


@methods.register("hqq")
class HQQ(Method):
    """Zero points that make the error sparse: most weights nearly right, outliers wrong.

    Badri and Shaji, 2023, "Half-Quadratic Quantization of Large Machine Learning Models"
    (mobiusml.github.io/hqq_blog): minimises ‖W - Q⁻¹(Q(W))‖_p with p = 0.7 over the zero points by
    half-quadratic splitting. In turns, for a growing β,

        W_e = shrink(W - W_r, β) = sign(x) relu(|x| - |x|^(p-1) / β)     (their equation 4)
        z   = mean over the group of (W_q - (W - W_e) / s)               (their equation 8)

    until the error no longer falls. Zero points come out fractional, which the kernels take.
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
        kept = SCALE_DTYPES[grid.scale_dtype]
        best = quantize(w_NK, grid, scale=scale, zero=zero)
        best_error = self._error(w_NK, best, grid)
        beta, current = _BETA, best
        for _ in range(_ROUNDS):
            found = dequantize(*current, grid)
            outliers = _shrink(w_NK - found, beta)
            zero = _group_mean(current.codes, w_NK - outliers, scale, grid)
            zero = zero.clamp(*grid.code_range).to(kept).float()
            current = quantize(w_NK, grid, scale=scale, zero=zero)
            error = self._error(w_NK, current, grid)
            if error >= best_error:
                break
            best, best_error = current, error
            beta *= _GROWTH
        return best

    @staticmethod
    def _error(w_NK: Tensor, made: Quantized, grid: Grid) -> float:
        return float((w_NK - dequantize(*made, grid)).abs().mean())


def _shrink(x: Tensor, beta: float) -> Tensor:
    size = x.abs()
    return x.sign() * (size - size.clamp(min=1e-12).pow(_NORM - 1) / beta).clamp(min=0)


def _group_mean(codes: Tensor, w_NK: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """The mean over each group of code - w / s; groups of zeros keep 0."""
    K = w_NK.shape[1]
    size = K if grid.group == "row" else int(grid.group) if grid.group != "tensor" else K
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    spread = inverse.repeat_interleave(size, 1)[:, :K] if scale.shape[1] > 1 else inverse
    wanted = codes.float() - w_NK * spread
    if grid.group == "tensor":
        return wanted.mean().reshape(1, 1)
    padded = torch.nn.functional.pad(wanted, (0, -K % size)).unflatten(1, (-1, size))
    count = torch.full((padded.shape[1],), float(size), device=w_NK.device)
    count[-1] = K - size * (padded.shape[1] - 1)
    return padded.sum(2) / count
