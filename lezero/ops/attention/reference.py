"""Attention as the formula reads."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(q_BHME: Tensor, k_BGNE: Tensor, v_BGNE: Tensor, causal: bool, scale: float) -> Tensor:
    """softmax(scale · q kᵀ) v; with `causal`, query m sees keys 0 … m."""
    return attention_and_lse(q_BHME, k_BGNE, v_BGNE, causal, scale)[0]


def attention_and_lse(
    q_BHME: Tensor, k_BGNE: Tensor, v_BGNE: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Also logsumexp(scale · q kᵀ) of each row, (B, H, M). H is a multiple of G: query heads
    h·H/G … share key and value head h. All in fp32 (fp64 for fp64); the output in q's dtype."""
    wide = torch.float64 if q_BHME.dtype == torch.float64 else torch.float32
    group = q_BHME.shape[1] // k_BGNE.shape[1]
    k_BHNE = k_BGNE.to(wide).repeat_interleave(group, 1)
    v_BHNE = v_BGNE.to(wide).repeat_interleave(group, 1)
    s_BHMN = scale * q_BHME.to(wide) @ k_BHNE.mT
    if causal:
        seen_MN = torch.ones(s_BHMN.shape[-2:], dtype=torch.bool, device=s_BHMN.device).tril()
        s_BHMN = s_BHMN.masked_fill(~seen_MN, -torch.inf)
    return (s_BHMN.softmax(-1) @ v_BHNE).to(q_BHME.dtype), s_BHMN.logsumexp(-1)
