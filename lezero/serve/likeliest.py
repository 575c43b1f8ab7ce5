"""Each row's largest logit, and the token that has it. Shapes: R rows, V vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_PIECE, _LEAST_PIECE = 256, 16


def best_tokens(logits_RV: Tensor) -> list[int]:
    """The token with the largest logit of each row, the first of equals; -1 where that logit is not
    a finite number. The host asks an accelerator once."""
    highest_R, token_R = likeliest(logits_RV)
    found: list[int] = token_R.where(highest_R.isfinite(), -1).tolist()
    return found


def likeliest(scores_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest score, and the first token that has it; a NaN counts as the largest.

    In two steps: a CPU finds the largest of pieces at the speed of its cache, but is five times
    slower where it looks for its place at once.
    """
    R, V = scores_RV.shape
    size = math.gcd(V, _PIECE)
    if size < _LEAST_PIECE:
        highest_R, token_R = scores_RV.max(dim=-1)
        return highest_R, token_R
    pieces_RPS = scores_RV.view(R, -1, size)
    highest_R, piece_R = pieces_RPS.amax(-1).max(-1)
    inside_R = pieces_RPS[torch.arange(R, device=piece_R.device), piece_R].argmax(-1)
    return highest_R, piece_R * size + inside_R
