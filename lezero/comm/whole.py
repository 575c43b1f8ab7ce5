"""Whole tensors out of the rows that ranks hold."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lezero.core import groups, in_flight


def whole(value: Tensor, label: str) -> Tensor:
    """`value` itself, or the rows of all ranks where it is a DTensor in shards.

    Of shards it is collective, and the watch is told: it names a rank that is lost or does
    something else meanwhile, and `label`, which is the tensor's name.
    """
    if not hasattr(value, "full_tensor"):  # asked so, DTensor need not be imported
        return value
    found: Any = value
    if not any(placement.is_shard() for placement in found.placements):
        return found.full_tensor()  # every rank has it
    with groups.watched("all_gather", value.shape, value.dtype, label):
        in_flight.settle()
        return found.full_tensor()
