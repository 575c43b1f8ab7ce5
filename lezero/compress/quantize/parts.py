"""How much of a weight is worked on at once."""

from __future__ import annotations

import torch

_IN_CACHE = 1 << 19
_ON_ACCELERATORS = 1 << 24


def at_once(place: torch.device) -> int:
    """Numbers that are worked on together where they lie.

    On a CPU 2 MiB in fp32: what is computed with them stays in the caches, and each operation has
    work enough to be worth waking threads for, also where other programs keep them from running. On
    an accelerator 64 MiB: enough work for each of its kernels to be worth the launch, and few
    temporaries beside the model.
    """
    return _IN_CACHE if place.type == "cpu" else _ON_ACCELERATORS
