"""Topology "flat": every rank sends every other its chunk, then sums in rank order.

A reduce-scatter is an all-to-all of chunks; an all-reduce gathers the sums afterwards. Each of n
ranks sends (n - 1) · s bytes in a reduce-scatter or an all-gather with s bytes a chunk, and twice
that in an all-reduce.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lezero.comm.buffers import Buffers
from lezero.comm.pending import Arrived, Steps
from lezero.comm.route import Route, Spans
from lezero.ops.ordered_sum import ordered_sum


class Flat(Route):
    """`lanes`: two groups of the same ranks, for the first and the second exchange (`pending`)."""

    def __init__(
        self, lanes: tuple[dist.ProcessGroup, dist.ProcessGroup], buffers: Buffers
    ) -> None:
        self._lanes, self._buffers = lanes, buffers
        self._size, self._rank = lanes[0].size(), lanes[0].rank()

    def reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, key: str, spans: Spans
    ) -> Steps:
        received = self._buffers.take(flat.numel(), flat.dtype)
        yield self._exchange(flat, received, lane=0)
        ordered_sum(chunks(received, self._size), out)
        self._buffers.give(received)

    def all_gather(self, shard: torch.Tensor, out: torch.Tensor, key: str) -> Steps:
        yield self._gather(shard, out, lane=0)

    def all_reduce(self, flat: torch.Tensor, key: str, spans: Spans) -> Steps:
        own = chunks(flat, self._size)[self._rank]
        yield from self.reduce_scatter(flat, own, key, spans)
        yield self._gather(own, flat, lane=1)

    def _exchange(self, sent: torch.Tensor, received: torch.Tensor, lane: int) -> Arrived:
        group = self._lanes[lane]
        moved = (received.view(torch.uint8), sent.view(torch.uint8))
        return Arrived(dist.all_to_all_single(*moved, group=group, async_op=True))

    def _gather(self, shard: torch.Tensor, out: torch.Tensor, lane: int) -> Arrived:
        group = self._lanes[lane]
        moved = (out.view(torch.uint8), shard.view(torch.uint8))
        return Arrived(_all_gather()(*moved, group=group, async_op=True))


def _all_gather() -> Any:
    """torch renamed it in 2.13 and warns of the old name."""
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def chunks(flat: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """`count` equal parts of `flat`; also of an empty one."""
    return flat.view(count, flat.numel() // count).unbind()
