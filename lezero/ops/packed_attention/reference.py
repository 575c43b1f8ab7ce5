"""The formula, and the same over padded texts, which devices without a kernel of ours compute.

Letters: N tokens of all texts, H heads, E width of a head, B texts of a group, T tokens of its
longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def packed_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], heads: int) -> Tensor:
    """softmax(q kᵀ / sqrt(E)) v of each text and head, in fp32 (fp64 for fp64); all (N, H E)."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    by_head = (x.to(wide).unflatten(1, (heads, -1)).transpose(0, 1) for x in (q, k, v))
    parts = [x.split(lengths, 1) for x in by_head]
    found = [q.new_empty(heads, 0, q.shape[1] // heads, dtype=wide)]
    for q_HTE, k_HTE, v_HTE in zip(*parts, strict=True):
        score_HTT = q_HTE @ k_HTE.transpose(1, 2) / q_HTE.shape[2] ** 0.5
        found.append(score_HTT.softmax(-1) @ v_HTE)
    return torch.cat(found, 1).transpose(0, 1).flatten(1).to(q.dtype)


def by_groups(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], heads: int) -> Tensor:
    """The same by torch's attention: texts of similar length lie side by side, padded to the
    longest of them. Differentiable."""
    out = torch.empty_like(q)
    begins = [0]
    for length in lengths:
        begins.append(begins[-1] + length)
    for group in similar(lengths):
        own = [lengths[i] for i in group]
        longest, even = max(own), min(own) == max(own)
        start_B1 = torch.tensor([begins[i] for i in group], device=q.device)[:, None]
        place_T = torch.arange(longest, device=q.device)
        real_BT = place_T < torch.tensor(own, device=q.device)[:, None]
        from_BT = torch.where(real_BT, start_B1 + place_T, start_B1)
        shape = (len(group), longest, heads, -1)
        places = from_BT.flatten()
        real = real_BT.flatten()
        # Not finite values of a text must not meet the weight 0 in its padding.
        rows = (q[places], *(x[places].where(real[:, None], 0) for x in (k, v)))
        q_BHTE, k_BHTE, v_BHTE = (x.view(shape).transpose(1, 2) for x in rows)
        mask = None if even else real_BT[:, None, None, :]
        mixed = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, attn_mask=mask)
        found = mixed.transpose(1, 2).flatten(0, 1).flatten(1)
        out = out.index_copy(0, places[real], found[real])
    return out


def similar(lengths: Sequence[int]) -> list[list[int]]:
    """Texts of similar length: padding to the longest is cheaper than another call until it doubles
    the shortest."""
    groups: list[list[int]] = []
    for text in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not groups or lengths[text] > 2 * max(8, lengths[groups[-1][0]]):
            groups.append([])
        groups[-1].append(text)
    return groups
