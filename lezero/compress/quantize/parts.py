"""How much of a weight is worked on at once."""

from __future__ import annotations

import torch

_IN_CACHE = 1 << 16
_ON_ACCELERATORS = 1 << 24


def at_once(place: torch.device) -> int:
    """Numbers that are worked on together where they lie.

    On a CPU 256 KiB in fp32: what is computed with them stays in a core's second cache, and is too
    small for the heap to ask the kernel for fresh pages each time. On an accelerator 64 MiB: enough
    work for each of its kernels to be worth the launch, and few temporaries beside the model.
    """
    return _IN_CACHE if place.type == "cpu" else _ON_ACCELERATORS
