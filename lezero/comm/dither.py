"""Rounding that is right on average, for errors that are kept in eight bits.

What is owed of a small gradient beside large ones grows by less than half a step of the block's
codes, so rounding to nearest would give 0 each time, and it would never be paid. With a random part
of a step added before (dither: Roberts 1962), the mean of what is kept is what is owed.
"""

from __future__ import annotations

import torch

_LEVELS = 127  # of the codec "int8", to either side
_AT_ONCE = 1 << 16  # elements, for a processor's cache


class Dither:
    """Noise from a table that is drawn once, from another place of it each time."""

    def __init__(self, block: int, seed: int, device: torch.device) -> None:
        self._block = block
        self._draw = torch.Generator().manual_seed(seed)
        noise = torch.rand(2 * _AT_ONCE, generator=self._draw) - 0.5
        self._noise = noise.to(device, torch.float32)

    def add(self, x: torch.Tensor) -> None:
        """Adds to `x`, (numel,) fp32, up to half a step of the codes of its blocks; zeros stay."""
        whole = len(x) // self._block * self._block
        for begin in range(0, whole, _AT_ONCE):
            self._add(x[begin : min(whole, begin + _AT_ONCE)].view(-1, self._block))
        if whole < len(x):
            self._add(x[whole:].view(1, -1))

    def _add(self, x_NB: torch.Tensor) -> None:
        top_N = torch.linalg.vector_norm(x_NB, torch.inf, 1, keepdim=True)
        step_N = (top_N / _LEVELS).nan_to_num_(0.0, 0.0, 0.0)
        begin = int(torch.randint(_AT_ONCE, (1,), generator=self._draw))
        noise_NB = self._noise[begin : begin + x_NB.numel()].view(x_NB.shape)
        x_NB += (noise_NB * step_N).masked_fill_(x_NB == 0, 0.0)
