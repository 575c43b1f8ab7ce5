"""How many panels of a weight few tokens take at a time, by what is faster on this machine.

Some processors read one stream of lines faster than two, others compute faster with two panels at
a time: [Note: one panel after the other] in `tiles.h`. What comes out is the same to the bit.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from lezero.ops.decoder.native import NATIVE
from lezero.ops.decoder.op import BlockCache, Decoder

_SECONDS, _LEAST, _MOST = 0.2, 2, 15
_CLEARLY = 0.97
"""Of the other's time. The rest is chance."""


@torch.no_grad()
def settle_panels(decoder: Decoder) -> dict[int, float]:
    """Takes a token through the layers in turns, for 0.2 s and at least twice each, and sets
    `decoder.panels`. Returns the seconds of a token with 1 and 2; empty where no kernel runs.
    """
    if not NATIVE.available():
        return {}
    shape = decoder.shape
    here: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    numbers: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
    angles = torch.ones(1, shape.head_dim // 2, **here)
    cache = BlockCache.empty(len(decoder.layers), 1, shape)
    chunks, table = torch.tensor([[0, 1, 0]], **numbers), torch.zeros(1, 1, **numbers)
    row = torch.zeros(1, **numbers)

    def seconds(panels: int) -> float:
        decoder.panels = panels
        x_TD = torch.ones(1, shape.dim, **here)
        began = time.perf_counter()
        decoder.logits(x_TD, angles, angles, chunks, table, cache, row)
        return time.perf_counter() - began

    seconds(1)  # fetches what is still elsewhere
    one, two = list[float](), list[float]()
    while len(two) < _LEAST or (len(two) < _MOST and sum(one) + sum(two) < _SECONDS):
        one.append(seconds(1))
        two.append(seconds(2))
    decoder.panels = faster(one, two)
    return {1: median(one), 2: median(two)}


def faster(one: list[float], two: list[float]) -> int:
    """1 or 2 where it wins clearly, at its best and in the middle; else 0, the kernel's own."""
    for panels, ours, others in ((1, one, two), (2, two, one)):
        if all(of(ours) < _CLEARLY * of(others) for of in (min, median)):
            return panels
    return 0
