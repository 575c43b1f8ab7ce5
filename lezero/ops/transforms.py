"""Whether derivatives are asked for in another way than by the graph that autograd records."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def transformed() -> bool:
    """In forward mode, or below a transform of `torch.func`: ops know the graph alone there."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
