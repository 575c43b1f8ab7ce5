"""Chooses the next token from logits: greedy, temperature, top-k, top-p, min-p.

The order is temperature, then top-k, top-p and min-p, as in transformers. Chance comes from (seed,
position, sample) alone: no generator is carried along, so a token does not depend on what else is
in the batch, on the cache or on the device.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from lezero.core.config import Config
from lezero.core.device import with_doubles
from lezero.core.errors import NumericsError


class Sampling(Config):
    """How the next token is chosen."""

    temperature: float = Field(default=0.0, ge=0.0)
    """Divides the logits; 0 takes the most likely token (greedy)."""
    top_k: int | None = Field(default=None, ge=1)
    """Choose among this many most likely tokens; none: all."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """Choose among the fewest most likely tokens that together reach this probability."""
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    """Choose among tokens at least this many times as likely as the most likely one."""
    seed: int = Field(default=0, ge=0)
    """Equal seeds give equal tokens."""


def chance(seed: int, position: int, sample: int) -> float:
    """A number in [0, 1), uniform over 2^53 values, that depends on these three alone."""
    digest = hashlib.blake2b(f"{seed}:{position}:{sample}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that tokens are drawn from, `(B, V)` fp64; refused tokens have 0.

    Among equal logits the lower token comes first, so top-k keeps exactly k tokens. Top-p keeps a
    token while those before it have less than top_p together, so at least one is kept.
    """
    order_BV, kept_BV = _sorted(with_doubles(logits_BV), sampling)
    return torch.zeros_like(kept_BV).scatter_(1, order_BV, kept_BV)


def choose(
    logits_BV: Tensor, sampling: Sampling, positions: Sequence[int], samples: Sequence[int]
) -> Tensor:
    """The next token of each sequence, `(B,)` int64.

    `positions[b]` is the position that the token will take, `samples[b]` the number of the
    sequence; both only feed the chance. NaN logits are a `NumericsError`, and so are those without
    a finite maximum.
    """
    if not bool(logits_BV.amax(dim=-1).isfinite().all()):  # NaN is the maximum of what it is in
        raise NumericsError(
            "the model's logits hold NaN or no finite maximum; no token can be chosen from them"
        )
    if sampling.temperature == 0.0:
        return logits_BV.argmax(dim=-1)
    place, logits_BV = logits_BV.device, with_doubles(logits_BV)
    order_BV, kept_BV = _sorted(logits_BV, sampling)
    drawn = [chance(sampling.seed, p, s) for p, s in zip(positions, samples, strict=True)]
    drawn_B1 = torch.tensor(drawn, dtype=torch.float64, device=logits_BV.device)[:, None]
    reached_BV = kept_BV.cumsum(dim=-1)
    index_B1 = torch.searchsorted(reached_BV, drawn_B1 * reached_BV[:, -1:], right=True)
    last_B1 = (kept_BV > 0).sum(dim=-1, keepdim=True) - 1
    return order_BV.gather(1, torch.minimum(index_B1, last_B1))[:, 0].to(place)


def _sorted(logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens from most to least likely, and their probabilities after top-k, top-p and min-p."""
    scores_BV, order_BV = logits_BV.double().sort(dim=-1, descending=True, stable=True)
    if sampling.temperature == 0.0:
        kept_BV = torch.zeros_like(scores_BV)
        kept_BV[:, 0] = 1.0
        return order_BV, kept_BV
    scores_BV = (scores_BV - scores_BV[:, :1]) / sampling.temperature
    if sampling.top_k is not None:
        scores_BV[:, sampling.top_k :] = -torch.inf
    kept_BV = scores_BV.softmax(dim=-1)
    if sampling.top_p is not None:
        before_BV = kept_BV.cumsum(dim=-1) - kept_BV
        kept_BV = kept_BV.masked_fill(before_BV >= sampling.top_p, 0.0)
    if sampling.min_p is not None:
        kept_BV = kept_BV.masked_fill(scores_BV.exp() < sampling.min_p, 0.0)
    kept_BV = kept_BV / kept_BV.sum(dim=-1, keepdim=True)
    return order_BV, kept_BV
