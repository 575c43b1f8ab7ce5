"""Perplexity of a language model on held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from lezero.train.loss import token_cross_entropy


@torch.no_grad()
def perplexity(model: Callable[[Tensor], Tensor], batches: Iterable[Mapping[str, Tensor]]) -> float:
    """exp of the mean loss of a token over `batches` of tokens and targets (B, T); `model` gives
    logits (B, T, V)."""
    total, count = 0.0, 0
    for batch in batches:
        tokens = int((batch["targets"] >= 0).sum())
        total += float(token_cross_entropy(model(batch["tokens"]), batch["targets"])) * tokens
        count += tokens
    return math.exp(min(total / max(1, count), 80.0))
