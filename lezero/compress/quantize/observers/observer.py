"""Extension point: observers, which choose the range that a scale covers.

Who calls what when: a calibration makes one observer for the input of each layer that needs a
static scale (`channels` = 1: one for the whole tensor), calls `observe` with the values of each
batch, arranged as (channels, values), and in the end `range`. Values beyond the range will
saturate. Built in: "minmax", "percentile", "kl", "mse"; a plug-in's: entry point group
`lezero.plugins`, name `observer.<name>`.

`tests/compress/observer_conformance.py` holds a test class that a new observer's tests inherit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from torch import Tensor

from lezero.core.registry import Registry


class Observer(ABC):
    """Sees the values of `channels` that each get a scale of their own."""

    def __init__(self, channels: int = 1) -> None:
        self.channels = channels

    @abstractmethod
    def observe(self, x_CN: Tensor) -> None:
        """Takes in one batch of values, finite floats; N may differ from batch to batch."""

    @abstractmethod
    def range(self, levels: int, symmetric: bool = False) -> tuple[Tensor, Tensor]:
        """Lowest and highest value to keep, fp32 (channels,), for a grid of `levels` codes.

        They lie evenly from the lowest to the highest, or, where `symmetric`, as far below 0 as
        above it, whichever is the farther, with 0 in their middle. The lowest is at most 0, the
        highest at least 0, and both lie within what was seen (or 0).
        """


observers: Registry[type[Observer]] = Registry("observer", Observer)


def arranged(x: Tensor, per: Literal["tensor", "channel", "token"] | int, dim: int = -1) -> Tensor:
    """`x` as (channels, values): one channel for all of it, for each index of `dim` ("channel"),
    for each row along `dim` ("token"), or for each group of that many neighbours along `dim`."""
    if per == "tensor":
        return x.reshape(1, -1)
    moved = x.movedim(dim, -1)
    if per == "channel":
        return moved.flatten(0, -2).T if moved.dim() > 1 else moved[:, None]
    if per == "token":
        return moved.reshape(-1, moved.shape[-1])
    assert isinstance(per, int)
    assert moved.shape[-1] % per == 0
    return moved.reshape(-1, per)
