"""What tensors hold in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def flat_bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as uint8 in one dimension; shares its memory.

    Of one value, torch calls any stride contiguous, and a copy keeps it, but `view` gives bytes
    only where it is 1.
    """
    assert x.is_contiguous()
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)
