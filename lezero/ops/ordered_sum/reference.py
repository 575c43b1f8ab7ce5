"""The sum in plain PyTorch: what every kernel is held to, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def ordered_sum(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """out = ((parts[0] + parts[1]) + parts[2]) + …, each addition in fp32, rounded once.

    In fp64 where a part is.
    """
    wide = torch.float64 if any(p.dtype == torch.float64 for p in parts) else torch.float32
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)
