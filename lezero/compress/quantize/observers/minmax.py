"""The observer that keeps everything."""

from __future__ import annotations

import torch
from torch import Tensor

from lezero.compress.quantize.observers.observer import Observer, observers


@observers.register("minmax")
class MinMax(Observer):
    """The lowest and the highest value seen: nothing saturates, outliers make the steps coarse."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__(channels)
        self._low: Tensor | None = None
        self._high: Tensor | None = None

    def observe(self, x_CN: Tensor) -> None:
        low, high = (x.float() for x in x_CN.aminmax(dim=1))
        self._low = low if self._low is None else torch.minimum(self._low, low)
        self._high = high if self._high is None else torch.maximum(self._high, high)

    def range(self, levels: int, symmetric: bool = False) -> tuple[Tensor, Tensor]:
        assert self._low is not None
        assert self._high is not None
        return self._low.clamp(max=0.0), self._high.clamp(min=0.0)
