"""Counters of programs or blocks that have ended: the last one joins what the others left."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lezero.core.device import stream

MOST_COUNTED = 1 << 16


def counts(device: torch.device) -> Tensor:
    """One for each part of a launch's result, `MOST_COUNTED` at most: the last program of a part
    sets its count to 0 again. For launches of this stream, of which none counts before those ahead
    of it have ended."""
    return _counts(device, stream(device))


@functools.cache
def _counts(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(MOST_COUNTED, dtype=torch.int32, device=device)
