"""Buffers of a wire: allocated once and used again."""

from __future__ import annotations

from collections import defaultdict

import torch


class Buffers:
    """Lends flat tensors by size and type. A buffer that was given back is lent again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self.allocated_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of `numel` elements with unknown content."""
        free = self._free[numel, dtype]
        if free:
            return free.pop()
        tensor = torch.empty(numel, dtype=dtype, device=self.device)
        self.allocated_bytes += tensor.nbytes
        return tensor

    def give(self, *tensors: torch.Tensor) -> None:
        """Takes back what `take` lent."""
        for tensor in tensors:
            self._free[tensor.numel(), tensor.dtype].append(tensor)
