"""Cross-entropy as the formula reads."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -100


def cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Σ over rows with target t ≠ -100 of (m - x[t]) + log Σ exp(x - m), where m is the largest of
    x, in fp32 (fp64 for fp64 logits)."""
    x_NV = logits_NV.double() if logits_NV.dtype == torch.float64 else logits_NV.float()
    counted_N = targets_N != IGNORED
    nats_NV = -x_NV.log_softmax(1)
    index_N = torch.where(counted_N, targets_N, 0).long()
    picked_N = nats_NV.gather(1, index_N[:, None])[:, 0]
    return torch.where(counted_N, picked_N, 0.0).sum()
