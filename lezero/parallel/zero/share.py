"""Rank 0's values on every rank: a model that is sharded is the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from lezero.core import device, groups, in_flight
from lezero.core.tensors import flat_bytes
from lezero.parallel.zero import checks


@torch.no_grad()
def share(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Puts rank 0's values into tensors that have memory; collective.

    As bytes: backends know few types, and some of them only an accelerator, where a buffer need
    not lie.
    """
    if groups.world_size() == 1:
        return
    for name, tensor in named:
        if not tensor.is_meta and tensor.numel():
            data = tensor.data.contiguous()
            if not checks.moves(data.device.type):
                data = data.to(device.device())
            with groups.watched("broadcast", data.shape, data.dtype, name):
                in_flight.wait(dist.broadcast(flat_bytes(data), 0, async_op=True))
            if data.data_ptr() != tensor.data_ptr():
                tensor.data.copy_(data)
