"""Rounding that is right on average, for errors that are kept in eight bits.

What is owed of a small gradient beside large ones grows by less than half a step of the block's
codes, so rounding to nearest would give 0 each time, and it would never be paid. With a random part
of a step added before (dither: Roberts 1962), the mean of what is kept is what is owed: to 0.3% for
a hundredth of a block's largest, to 10% for a ten-thousandth (200 times 32,768 of them).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LEVELS = 127  # of the codec "int8", to either side
_AT_ONCE = 1 << 16  # elements, for a processor's cache


class Dither:
    """For errors on `device`. On a processor noise comes from a table that is drawn once, from
    another place of it each time: drawing takes longer than all else."""

    def __init__(self, block: int, seed: int, device: torch.device) -> None:
        self._block = block
        self._draw = torch.Generator(device).manual_seed(seed)
        self._table: torch.Tensor | None = None
        if device.type == "cpu":
            self._table = self._drawn((2 * _AT_ONCE,))

    def add(self, x: torch.Tensor) -> None:
        """Adds to `x`, (numel,) fp32, up to half a step of the codes of its blocks; zeros and the
        largest of each block stay, so that the codes' steps do."""
        whole = len(x) // self._block * self._block
        at_once = _AT_ONCE if self._table is not None else max(1, whole)
        for begin in range(0, whole, at_once):
            self._add(x[begin : min(whole, begin + at_once)].view(-1, self._block))
        if whole < len(x):
            self._add(x[whole:].view(1, -1))

    def _add(self, x_NB: torch.Tensor) -> None:
        size_NB = x_NB.abs()
        top_N1 = size_NB.amax(1, keepdim=True)
        noise_NB = self._noise(x_NB) * _rounded_up(top_N1 / _LEVELS).nan_to_num_(0.0, 0.0, 0.0)
        noise_NB.masked_fill_((size_NB == 0) | (size_NB == top_N1), 0.0)
        x_NB.add_(noise_NB).clamp_(-top_N1, top_N1)

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        if self._table is None:
            return self._drawn(like.shape)
        begin = int(torch.randint(_AT_ONCE, (1,), generator=self._draw))
        return self._table[begin : begin + like.numel()].view(like.shape)

    def _drawn(self, shape: Sequence[int]) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.float32, device=self._draw.device)
        return made.uniform_(generator=self._draw) - 0.5


def _rounded_up(x: torch.Tensor) -> torch.Tensor:
    """To bf16, as the codec rounds its scales."""
    nearest = x.bfloat16()
    above = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    return torch.where(nearest < x, above, nearest).float()
