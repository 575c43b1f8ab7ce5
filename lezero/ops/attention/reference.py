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
    q, k, v = _widened(q_BHME, k_BGNE, v_BGNE)
    s_BHMN = _scores(q, k, causal, scale)
    return (s_BHMN.softmax(-1) @ v).to(q_BHME.dtype), s_BHMN.logsumexp(-1)


def attention_backward(
    grad_BHME: Tensor,
    q_BHME: Tensor,
    k_BGNE: Tensor,
    v_BGNE: Tensor,
    out_BHME: Tensor,
    lse_BHM: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from that of the output, with P = exp(scale · q kᵀ - lse)."""
    q, k, v = _widened(q_BHME, k_BGNE, v_BGNE)
    grad = grad_BHME.to(q.dtype)
    p_BHMN = (_scores(q, k, causal, scale) - lse_BHM[..., None]).exp()
    delta_BHM = (grad * out_BHME).sum(-1)
    s_BHMN = scale * p_BHMN * (grad @ v.mT - delta_BHM[..., None])
    heads = (k_BGNE.shape[1], -1)  # the gradients of a shared head add up
    grad_k = (s_BHMN.mT @ q).unflatten(1, heads).sum(2)
    grad_v = (p_BHMN.mT @ grad).unflatten(1, heads).sum(2)
    return (s_BHMN @ k).to(q_BHME.dtype), grad_k.to(k_BGNE.dtype), grad_v.to(v_BGNE.dtype)


def _widened(q_BHME: Tensor, k_BGNE: Tensor, v_BGNE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if q_BHME.dtype == torch.float64 else torch.float32
    group = q_BHME.shape[1] // k_BGNE.shape[1]
    k, v = (x.to(wide).repeat_interleave(group, 1) for x in (k_BGNE, v_BGNE))
    return q_BHME.to(wide), k, v


def _scores(q_BHME: Tensor, k_BHNE: Tensor, causal: bool, scale: float) -> Tensor:
    s_BHMN = scale * q_BHME @ k_BHNE.mT
    if causal:
        seen_MN = torch.ones(s_BHMN.shape[-2:], dtype=torch.bool, device=s_BHMN.device).tril()
        s_BHMN = s_BHMN.masked_fill(~seen_MN, -torch.inf)
    return s_BHMN
