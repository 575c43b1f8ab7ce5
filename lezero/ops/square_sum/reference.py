"""The sums in plain PyTorch: what every kernel is held to, bit for bit."""

from __future__ import annotations

import torch
from torch.nn import functional as F

LANES = 64
BLOCK = 1 << 14


def square_sum(x: torch.Tensor) -> float:
    """Of the elements of `x` in order, by blocks of 2^14.

    Within a block 64 lanes take every 64th element each, and are added by halves: 0 to 31 with 32
    to 63, and so on. The blocks' sums are added in order.
    """
    flat = x.detach().reshape(-1)
    blocks = -(-flat.numel() // BLOCK)
    filled = F.pad(flat, (0, blocks * BLOCK - flat.numel())).view(blocks, BLOCK // LANES, LANES)
    sums = torch.zeros(blocks, LANES, dtype=torch.float64, device=x.device)
    for row in filled.unbind(1):
        sums += row.double().square()
    while sums.shape[1] > 1:
        low, high = sums.chunk(2, dim=1)
        sums = low + high
    total = 0.0
    for block in sums.flatten().tolist():
        total += block
    return total
