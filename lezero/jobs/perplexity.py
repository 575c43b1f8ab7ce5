"""Perplexity of a language model on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lezero.train import next_token_loss


@torch.no_grad()
def perplexity(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> float:
    """exp of the mean loss of a token over `batches` of tokens and targets (B, T)."""
    total, count = 0.0, 0
    for batch in batches:
        tokens = int((batch["targets"] >= 0).sum())
        total += float(next_token_loss(model, batch)) * tokens
        count += tokens
    return math.exp(min(total / max(1, count), 80.0))
