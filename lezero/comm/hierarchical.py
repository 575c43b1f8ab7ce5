"""Topology "hierarchical": inside each host through its memory, then between the hosts.

With H hosts of L ranks, rank h · L + l is partner l of host h. A reduce-scatter first sums, in
local rank order, what the L ranks of a host have for the l-th ranks of all hosts, then
reduce-scatters those sums among the partners l, in host order: each byte leaves a host once, not L
times. Gathers go the other way round. Host sums are rounded to the tensor's type, or kept in fp32
where a codec follows.
"""

from __future__ import annotations

import torch

from lezero.comm.buffers import Buffers
from lezero.comm.flat import Flat, chunks
from lezero.comm.pending import Steps
from lezero.comm.route import Route, Span, Spans
from lezero.comm.shared import Shared
from lezero.comm.spans import cut


class Hierarchical(Route):
    """`inner`: the ranks of this host. `outer`: its partners on the others; `hosts` of them."""

    def __init__(
        self, inner: Shared, outer: Flat, hosts: int, buffers: Buffers, sums: torch.dtype | None
    ) -> None:
        self._inner, self._outer, self._buffers, self._sums = inner, outer, buffers, sums
        self._hosts, self._local, self._mine = hosts, inner.size, inner.rank

    def sum_in(self, dtype: torch.dtype | None) -> None:
        """Host sums are kept in `dtype` from now on (None: the tensor's). Nothing is in flight."""
        self._sums = dtype

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._inner.buffer(numel, dtype)

    def reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, key: str, spans: Spans
    ) -> Steps:
        hand = self._inner.handshake
        place, staged = self._inner.placed(flat)
        number = self._inner.begin("reduce_scatter", flat, place, key)
        yield hand.others(0, number)
        sums = self._host_sums(number, flat)
        hand.tell(1, number)
        yield from self._outer.reduce_scatter(sums, out, key, self._moved(flat, spans))
        self._outer.leave(spans)  # what this rank has not paid its neighbours have
        yield hand.others(1, number)
        self._buffers.give(sums)
        self._inner.give(staged)

    def all_gather(self, shard: torch.Tensor, out: torch.Tensor, key: str) -> Steps:
        hand = self._inner.handshake
        place, staged = self._inner.placed(out, fill=False)
        number = self._inner.begin("all_gather", out, place, key)
        yield hand.others(0, number)
        gathered = self._buffers.take(self._hosts * shard.numel(), shard.dtype)
        yield from self._outer.all_gather(shard, gathered, key)
        self._put(gathered, out if staged is None else staged.view(out.dtype), shard)
        hand.tell(2, number)
        yield hand.others(2, number)
        self._fetch(number, out, own=staged is not None, shard=shard)
        hand.tell(3, number)
        yield hand.others(3, number)
        self._buffers.give(gathered)
        self._inner.give(staged)

    def all_reduce(self, flat: torch.Tensor, key: str, spans: Spans) -> Steps:
        hand = self._inner.handshake
        place, staged = self._inner.placed(flat)
        number = self._inner.begin("all_reduce", flat, place, key)
        yield hand.others(0, number)
        sums = self._host_sums(number, flat)
        hand.tell(1, number)
        yield from self._outer.all_reduce(sums, key, self._moved(flat, spans))
        self._outer.leave(spans)
        # Nobody else reads these chunks of this rank's memory before they are told.
        self._put(sums, flat if staged is None else staged.view(flat.dtype))
        hand.tell(3, number)
        yield hand.others(3, number)
        self._fetch(number, flat, own=staged is not None)
        hand.tell(4, number)
        yield hand.others(4, number)
        self._buffers.give(sums)
        self._inner.give(staged)

    def close(self) -> None:
        self._inner.close()

    def _ranks(self, local: int) -> range:
        """The chunks that belong to the `local`-th ranks of all hosts."""
        return range(local, self._hosts * self._local, self._local)

    def _host_sums(self, number: int, flat: torch.Tensor) -> torch.Tensor:
        length = flat.numel() // (self._hosts * self._local)
        sums = self._buffers.take(self._hosts * length, self._sums or flat.dtype)
        for rank, part in zip(self._ranks(self._mine), chunks(sums, self._hosts), strict=True):
            self._inner.add_up(number, flat, rank * length, part)
        return sums

    def _put(
        self, parts: torch.Tensor, whole: torch.Tensor, shard: torch.Tensor | None = None
    ) -> None:
        """Copies the chunks of ranks like this one, but not to where `shard` lies."""
        places = chunks(whole, self._hosts * self._local)
        for rank, part in zip(self._ranks(self._mine), chunks(parts, self._hosts), strict=True):
            if not _begins(places[rank], shard):
                places[rank].copy_(part)

    def _fetch(
        self, number: int, out: torch.Tensor, own: bool, shard: torch.Tensor | None = None
    ) -> None:
        """Copies from each rank of this host the chunks that it has put; `own`: its own too, but
        not to where `shard` lies."""
        parts = chunks(out, self._hosts * self._local)
        for local in range(self._local):
            if local != self._mine or own:
                for rank in self._ranks(local):
                    if not _begins(parts[rank], shard):
                        self._inner.fetch(number, local, rank, parts[rank])

    def _moved(self, flat: torch.Tensor, spans: Spans) -> Spans:
        """Where the spans lie in the host sums."""
        length = flat.numel() // (self._hosts * self._local)
        found: list[Span] = []
        for host, rank in enumerate(self._ranks(self._mine)):
            found += cut(spans, rank * length, (rank + 1) * length, host * length)
        return tuple(found)


def _begins(part: torch.Tensor, shard: torch.Tensor | None) -> bool:
    return shard is not None and part.data_ptr() == shard.data_ptr()
