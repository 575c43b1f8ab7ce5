"""GPTQ: each rounding error is made good by the weights not yet rounded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.methods.method import Method, methods
from lezero.compress.quantize.observers.scales import some_rows, weight_scale
from lezero.core.errors import NumericsError
from lezero.core.interrupts import let_in
from lezero.ops.quantize import Grid, Quantized, dequantize, quantize

_DAMPING = 0.01
# Inputs whose squares are smaller have lost their digits: they are rounded to nearest.
_LEAST = 1e-30
_COLUMNS = 128
_PANEL = 512


@methods.register("gptq")
class GPTQ(Method):
    """Rounds input by input and corrects what is left of the row after each.

    Frantar et al., 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
    Transformers", arXiv:2210.17323, algorithm 1: with H = 2XXᵀ + λI and U the upper Cholesky factor
    of H⁻¹, for input k in turn the error (w_k - ŵ_k) / U_kk goes into the later inputs with weights
    U_k: (equation 2, with U for H⁻¹). λ is 1% of H's mean diagonal. Inputs are taken in the order
    of falling H_kk, with each group's scale found beforehand, so that groups stay neighbours
    ("static groups").

    [Note: one Hessian in memory]
    H is permuted and factored in place, and H⁻¹ is never formed. H reversed is L Lᵀ; then R, L with
    rows and columns reversed, is upper triangular with H = R Rᵀ, so U = R⁻¹. Its rows are solved
    for 128 at a time, when they are used.
    """

    needs_data = True
    needs_hessian = True

    def codes(self, w_NK: Tensor, grid: Grid, rule: str, inputs: Inputs | None) -> Quantized:
        assert inputs is not None
        K = w_NK.shape[1]
        scale, zero = weight_scale(w_NK, grid, rule, inputs.importance)
        # One scale for the whole weight is that of each row.
        each = (len(w_NK), scale.shape[1])
        scale_NG, zero_NG = scale.expand(each), None if zero is None else zero.expand(each)
        if inputs.factor is None:
            assert inputs.hessian is not None
            inputs.factor, inputs.hessian = _factored(inputs.hessian, inputs.layers), None
        L, order = inputs.factor
        for rows in some_rows(w_NK):
            rows.copy_(rows[:, order])
        codes_NK = torch.empty(w_NK.shape, dtype=grid.code_dtype, device=w_NK.device)
        group_K = _groups(grid, K, w_NK.device)[order].tolist()
        for first in range(0, K, _COLUMNS):
            let_in()
            last = min(first + _COLUMNS, K)
            U = _rows_of_inverse(L, first, last)
            block = w_NK[:, first:last]
            wrong = torch.empty_like(block)
            for k in range(last - first):
                own = group_K[first + k]
                s, z = scale_NG[:, own, None], None if zero_NG is None else zero_NG[:, own, None]
                made = quantize(block[:, k, None], _single(grid), scale=s, zero=z)
                codes_NK[:, first + k] = made.codes[:, 0]
                left = (block[:, k] - dequantize(*made, _single(grid))[:, 0]) / U[k, k]
                block[:, k:].addr_(left, U[k, k : last - first], alpha=-1)
                wrong[:, k] = left
            w_NK[:, last:].addmm_(wrong, U[:, last - first :], alpha=-1)
        return Quantized(codes_NK[:, torch.argsort(order)], scale, zero)


def _factored(H: Tensor, layers: Sequence[str]) -> tuple[Tensor, Tensor]:
    """L in H's memory, and the order in which inputs are taken. See [Note: one Hessian in
    memory]. layers: whose inputs it is of."""
    diagonal = H.diagonal()
    order = torch.argsort(diagonal, descending=True, stable=True)
    damping = float(diagonal.mean()) * _DAMPING
    if damping < _LEAST:
        H.zero_()
    diagonal += max(damping, _LEAST)
    L = _permuted(H, order.flip(0)).mT  # the layout in which LAPACK factors in place
    info = torch.empty((), dtype=torch.int32, device=H.device)
    torch.linalg.cholesky_ex(L, out=(L, info))
    if int(info):
        raise NumericsError(
            f"GPTQ: the Hessian of the inputs of {', '.join(layers)} is not positive definite; "
            "give more, or more varied, calibration data"
        )
    return L, order


def _single(grid: Grid) -> Grid:
    """`grid` for one column at a time: each row has one scale."""
    return Grid(grid.format, "row", grid.zero_point, grid.scale_dtype)


def _groups(grid: Grid, K: int, device: torch.device) -> Tensor:
    size = grid.group if isinstance(grid.group, int) else K
    return torch.arange(K, device=device) // size


def _permuted(H: Tensor, order: Tensor) -> Tensor:
    """H[order][:, order], in H's own memory: a column's rows move by themselves, and then a
    row's columns."""
    for first in range(0, len(H), _PANEL):
        panel = H[:, first : first + _PANEL]
        panel.copy_(panel[order])
    for first in range(0, len(H), _PANEL):
        panel = H[first : first + _PANEL]
        panel.copy_(panel[:, order])
    return H


def _rows_of_inverse(L: Tensor, first: int, last: int) -> Tensor:
    """Rows first … last of U = R⁻¹, columns from `first` on; see [Note: one Hessian in memory].

    In reversed numbering they are the rows y with y L = e (for e the unit vectors of the last
    columns of L's leading part), solved panel by panel from the right.
    """
    size, rows = len(L) - first, last - first
    y = L.new_zeros(rows, size)
    for end in range(size, 0, -_PANEL):
        begin = max(0, end - _PANEL)
        right = -(y[:, end:] @ L[end:size, begin:end])
        for row in range(rows):
            column = size - rows + row
            if begin <= column < end:
                right[row, column - begin] += 1
        corner = L[begin:end, begin:end].contiguous()
        y[:, begin:end] = torch.linalg.solve_triangular(corner, right, upper=False, left=False)
    return y.flip(0, 1)
