"""Half-quadratic quantization: better zero points without data."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.methods.method import Method, methods
from lezero.compress.quantize.observers.scales import some_rows, weight_scale
from lezero.ops.quantize import Grid, Quantized
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
        x_NK = w_NK.reshape(1, -1) if grid.group == "tensor" else w_NK
        K = x_NK.shape[1]
        size = grid.group if isinstance(grid.group, int) else K
        codes, zeros = [], []
        # Groups of one length at a time: the last of a row may be shorter.
        for first, last in pairwise(sorted({0, K // size * size, K})):
            own = slice(first // size, -(-last // size))
            x_NGE = x_NK[:, first:last].unflatten(1, (-1, min(size, last - first)))
            found = _solve(x_NGE, scale[:, own, None], zero[:, own, None], grid)
            codes.append(found[0].flatten(1).to(grid.code_dtype))
            zeros.append(found[1].squeeze(2))
        return Quantized(torch.cat(codes, 1).view(w_NK.shape), scale, torch.cat(zeros, 1))


def _solve(w_NGE: Tensor, scale_NG1: Tensor, zero_NG1: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Codes (as floats) and zero points; E: the elements of a group."""
    inverse = torch.where(scale_NG1 > 0, 1 / scale_NG1, 0.0)
    scaled = w_NGE * inverse
    beta, best_error, best = _BETA, torch.inf, (w_NGE, zero_NG1)
    for _ in range(_ROUNDS + 1):
        codes = (scaled + zero_NG1).round_().clamp_(*grid.code_range)
        wrong = (codes - zero_NG1).mul_(scale_NG1)
        torch.sub(w_NGE, wrong, out=wrong)
        size = wrong.abs()
        error = float(size.mean())
        if error >= best_error:
            break
        best, best_error = (codes, zero_NG1), error
        outliers = _shrink(wrong, size, beta)
        inside = scaled if outliers is None else (w_NGE - outliers).mul_(inverse)
        zero_NG1 = (codes - inside).mean(2, keepdim=True).clamp_(*grid.code_range)
        zero_NG1 = zero_NG1.to(SCALE_DTYPES[grid.scale_dtype]).float()
        beta *= _GROWTH
    return best


def _shrink(x: Tensor, size: Tensor, beta: float) -> Tensor | None:
    """W_e, of |x| = `size`; None where it is 0 everywhere, as it is up to β^(-1 / (2 - p))."""
    if float(size.amax()) < 0.99 * beta ** (1 / (_NORM - 2)):
        return None
    return x.sign() * (size - size.clamp(min=1e-12).pow(_NORM - 1) / beta).clamp(min=0)
