"""Fitting in plain PyTorch, a group a row. Letters: G groups, E elements of a group.

A group w with scale s and zero point z has the codes clamp(round(w / s + z)), and each the point
(code - z) · s.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_KEPT = 0.5
_NORM = 0.7
_BETA, _GROWTH = 10.0, 1.01


def least_error(
    w_GE: Tensor,
    scale_G: Tensor,
    zero_G: Tensor | None,
    code_range: tuple[int, int],
    kept: torch.dtype,
    steps: int,
    importance_GE: Tensor | None = None,
) -> Tensor:
    """Of each group the share of `scale_G`, from 1 down to a half, of the least squared error."""
    full = best_scale = scale_G[:, None]
    zero = 0.0 if zero_G is None else zero_G[:, None]
    room = torch.empty_like(w_GE)

    def errors(scale: Tensor) -> Tensor:
        torch.mul(w_GE, _inverse(scale), out=room)
        codes = room.add_(zero).round_().clamp_(*code_range)
        wrong = codes.sub_(zero).mul_(scale).sub_(w_GE).square_()
        return (wrong if importance_GE is None else wrong.mul_(importance_GE)).sum(1, keepdim=True)

    best = errors(full)
    for step in range(1, steps):
        scale = (full * (1 - (1 - _LEAST_KEPT) * step / steps)).to(kept).float()
        error = errors(scale)
        better = error < best
        best = torch.where(better, error, best)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale.squeeze(1)


def half_quadratic(
    w_GE: Tensor,
    scale_G: Tensor,
    zero_G: Tensor,
    code_range: tuple[int, int],
    kept: torch.dtype,
    rounds: int,
    look: bool = True,
) -> tuple[Tensor, Tensor]:
    """Codes (uint8, G × E) and zero points (fp32, G) after HQQ's turns, a group each as long as its
    mean |error| falls. look: whether to end where none falls any more, for which the host waits in
    each turn; the result is the same."""
    scale, inverse = scale_G[:, None], _inverse(scale_G[:, None])
    scaled, tried = w_GE * inverse, zero_G[:, None]
    zero, beta, falls = tried, _BETA, torch.ones_like(tried, dtype=torch.bool)
    least = torch.full_like(tried, torch.inf)
    for _ in range(rounds + 1):
        codes = (scaled + tried).round_().clamp_(*code_range)
        wrong = w_GE - (codes - tried).mul_(scale)
        error = wrong.abs().mean(1, keepdim=True)
        falls = falls & (error < least)
        if look and not falls.any():
            break
        least, zero = torch.where(falls, error, least), torch.where(falls, tried, zero)
        inside = (w_GE - _shrink(wrong, beta)).mul_(inverse)
        tried = (codes - inside).mean(1, keepdim=True).clamp_(*code_range).to(kept).float()
        beta *= _GROWTH
    codes = (scaled + zero).round_().clamp_(*code_range).nan_to_num_(0.0)
    return codes.to(torch.uint8), zero.squeeze(1)


def _shrink(x: Tensor, beta: float) -> Tensor:
    size = x.abs()
    return x.sign() * (size - size.clamp(min=1e-12).pow(_NORM - 1) / beta).clamp(min=0)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, 1 / scale, 0.0)
