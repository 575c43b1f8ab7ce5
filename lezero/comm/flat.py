"""Topology "flat": every rank sends every other its chunk, then sums in rank order.

A reduce-scatter is an all-to-all of chunks; an all-reduce gathers the sums afterwards. Each of n
ranks sends (n - 1) · s bytes in a reduce-scatter or an all-gather with s bytes a chunk, and twice
that in an all-reduce.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lezero.comm.account import Account
from lezero.comm.buffers import Buffers
from lezero.comm.pending import Arrived, Steps
from lezero.comm.route import Route, Spans, untouched_zeros
from lezero.ops.ordered_sum import ordered_sum


class Flat(Route):
    """`lanes`: two groups of the same ranks, for the first and the second exchange (`pending`)."""

    def __init__(
        self,
        lanes: tuple[dist.ProcessGroup, dist.ProcessGroup],
        buffers: Buffers,
        account: Account,
    ) -> None:
        self._lanes, self._buffers, self._account = lanes, buffers, account
        self._size, self._rank = lanes[0].size(), lanes[0].rank()
        self._unread = torch.empty(0, dtype=torch.uint8)

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        place = self._buffers.device
        if place.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=place)
        return untouched_zeros(numel, dtype)

    def reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, key: str, spans: Spans
    ) -> Steps:
        yield from self._add_up(flat, out, "reduce_scatter")

    def all_gather(self, shard: torch.Tensor, out: torch.Tensor, key: str) -> Steps:
        parts = list(chunks(out, self._size))
        if out.device.type != "cpu" or parts[self._rank].data_ptr() != shard.data_ptr():
            yield self._gather(shard, out, 0, "all_gather")
            return
        # Gloo writes what it gathered when all is there, a rank's own chunk with it: to memory that
        # nobody reads, so that all that are in flight may share it.
        if self._unread.numel() < shard.nbytes:
            self._unread = torch.empty(shard.nbytes, dtype=torch.uint8)
        moved = [part.view(torch.uint8) for part in parts]
        moved[self._rank] = self._unread[: shard.nbytes]
        self._account.add("all_gather", shard.nbytes * (self._size - 1))
        sent = shard.view(torch.uint8)
        yield Arrived(dist.all_gather(moved, sent, group=self._lanes[0], async_op=True))

    def all_reduce(self, flat: torch.Tensor, key: str, spans: Spans) -> Steps:
        own = chunks(flat, self._size)[self._rank]
        yield from self._add_up(flat, own, "all_reduce")
        yield self._gather(own, flat, 1, "all_reduce")

    def leave(self, spans: Spans) -> None:
        """What was owed of these elements has been paid, here or by ranks that are not in this
        route; nothing is kept without a codec."""

    def _add_up(self, flat: torch.Tensor, out: torch.Tensor, what: str) -> Steps:
        received = self._buffers.take(flat.numel(), flat.dtype)
        yield self._exchange(flat, received, 0, what)
        ordered_sum(chunks(received, self._size), out)
        self._buffers.give(received)

    def _exchange(
        self, sent: torch.Tensor, received: torch.Tensor, lane: int, what: str
    ) -> Arrived:
        group = self._lanes[lane]
        self._account.add(what, sent.nbytes // self._size * (self._size - 1))
        moved = (received.view(torch.uint8), sent.view(torch.uint8))
        return Arrived(dist.all_to_all_single(*moved, group=group, async_op=True))

    def _gather(self, shard: torch.Tensor, out: torch.Tensor, lane: int, what: str) -> Arrived:
        group = self._lanes[lane]
        self._account.add(what, shard.nbytes * (self._size - 1))
        moved = (out.view(torch.uint8), shard.view(torch.uint8))
        return Arrived(_all_gather()(*moved, group=group, async_op=True))


def _all_gather() -> Any:
    """torch renamed it in 2.13 and warns of the old name."""
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def chunks(flat: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """`count` equal parts of `flat`; also of an empty one."""
    return flat.view(count, flat.numel() // count).unbind()
