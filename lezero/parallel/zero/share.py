"""Rank 0's values on every rank: a model that is sharded is the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from lezero.core import device, groups, in_flight
from lezero.core.tensors import flat_bytes, parts, repeats
from lezero.parallel.zero import checks


@torch.no_grad()
def share(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Puts rank 0's values into tensors that have memory; collective.

    As bytes: backends know few types, and some of them only an accelerator, where a buffer need
    not lie. A buffer made by `expand` gets memory for all its elements.
    """
    if groups.world_size() == 1:
        return
    for name, tensor in named:
        if tensor.is_meta:
            continue
        for part in parts(tensor):
            if part.numel():
                values = _from_first(name, part.data)
                if part is tensor and repeats(part):
                    tensor.data = values
                elif values.data_ptr() != part.data_ptr():
                    part.data.copy_(values)


def _from_first(name: str, data: torch.Tensor) -> torch.Tensor:
    """Rank 0's `data`, on every rank; in place where it is contiguous and the group reaches it."""
    place = data.device
    data = data.contiguous()
    if not checks.moves(place.type):
        data = data.to(device.device())
    with groups.watched("broadcast", data.shape, data.dtype, name):
        in_flight.wait(dist.broadcast(flat_bytes(data), 0, async_op=True))
    return data.to(place)
