"""Topology "shared": ranks of one host read each other's memory; no byte goes through a socket.

Each rank tells where its tensor lies and sums, or copies, its part straight from the others'. A
tensor outside `buffer()` memory is first copied into such memory. Results are bit for bit those of
the flat topology.
"""

from __future__ import annotations

import os
from collections import defaultdict

import torch
import torch.distributed as dist

from lezero.comm.account import OPERATIONS
from lezero.comm.flat import chunks
from lezero.comm.handshake import DTYPES, Handshake
from lezero.comm.pending import Steps
from lezero.comm.route import Route, Spans
from lezero.comm.shared_memory import Place, SharedMemory
from lezero.core import groups
from lezero.ops.ordered_sum import ordered_sum

_NOWHERE = Place(-1, -1, 0, 0)


class Shared(Route):
    """Made by all ranks of `group` together, which share a host. `names`: their world ranks."""

    def __init__(self, group: dist.ProcessGroup, names: list[int]) -> None:
        self._group, self.size, self.rank = group, group.size(), group.rank()
        self.memory = SharedMemory(self.rank, groups.gather_objects(os.getpid(), group))
        self.handshake = Handshake(group, names, self.memory)
        self._staging: dict[int, list[torch.Tensor]] = defaultdict(list)

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return self.memory.make(numel * dtype.itemsize).data.view(dtype)

    def reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, key: str, spans: Spans
    ) -> Steps:
        place, staged = self.placed(flat)
        number = self.begin("reduce_scatter", flat, place, key)
        yield self.handshake.others(0, number)
        self.add_up(number, flat, self.rank * out.numel(), out)
        self.handshake.tell(1, number)
        yield self.handshake.others(1, number)
        self.give(staged)

    def all_gather(self, shard: torch.Tensor, out: torch.Tensor, key: str) -> Steps:
        own = chunks(out, self.size)[self.rank]
        place, staged = self.memory.locate(shard) if shard.numel() else _NOWHERE, None
        if place is None and self.memory.locate(own) is not None:
            own.copy_(shard)
            place = self.memory.locate(own)
        if place is None:
            place, staged = self.placed(shard)
        number = self.begin("all_gather", shard, place, key)
        yield self.handshake.others(0, number)
        calls = self.handshake.calls(number)
        for call, part in zip(calls, chunks(out, self.size), strict=True):
            if part.data_ptr() == shard.data_ptr():
                continue
            if part.numel() and self.memory.locate(part) != call.place:
                part.copy_(self.memory.view(call.place, part.numel(), part.dtype))
        self.handshake.tell(1, number)
        yield self.handshake.others(1, number)
        self.give(staged)

    def all_reduce(self, flat: torch.Tensor, key: str, spans: Spans) -> Steps:
        place, staged = self.placed(flat)
        number = self.begin("all_reduce", flat, place, key)
        yield self.handshake.others(0, number)
        # A rank's own chunk is read by nobody else before its sum is there.
        moved = flat if staged is None else staged.view(flat.dtype)
        own = chunks(moved, self.size)[self.rank]
        self.add_up(number, flat, self.rank * own.numel(), own)
        self.handshake.tell(1, number)
        yield self.handshake.others(1, number)
        for rank, part in enumerate(chunks(flat, self.size)):
            if rank != self.rank or staged is not None:
                self.fetch(number, rank, rank, part)
        self.handshake.tell(2, number)
        yield self.handshake.others(2, number)
        self.give(staged)

    def close(self) -> None:
        self.handshake.close()
        self._staging.clear()
        self.memory.close()

    def begin(self, operation: str, tensor: torch.Tensor, place: Place, key: str) -> int:
        kind, dtype = OPERATIONS.index(operation), DTYPES.index(tensor.dtype)
        return self.handshake.begin(kind, dtype, tensor.numel(), place, key)

    def add_up(self, number: int, flat: torch.Tensor, begin: int, out: torch.Tensor) -> None:
        """`out` becomes the sum of elements from `begin` of every rank's tensor."""
        calls = self.handshake.calls(number)
        if out.numel():
            skip = begin * flat.dtype.itemsize
            at = [call.place._replace(offset=call.place.offset + skip) for call in calls]
            ordered_sum([self.memory.view(p, out.numel(), flat.dtype) for p in at], out)

    def fetch(self, number: int, rank: int, chunk: int, part: torch.Tensor) -> None:
        """Copies chunk `chunk` of the tensor of `rank` to `part`."""
        if part.numel():
            at = self.handshake.calls(number)[rank].place
            at = at._replace(offset=at.offset + chunk * part.nbytes)
            if self.memory.locate(part) != at:
                part.copy_(self.memory.view(at, part.numel(), part.dtype))

    def placed(
        self, tensor: torch.Tensor, *, fill: bool = True
    ) -> tuple[Place, torch.Tensor | None]:
        """Where others find `tensor`, and the staging memory that it was copied to, if any.

        Copies from `tensor` only with `fill`.
        """
        if not tensor.numel():
            return _NOWHERE, None
        place = self.memory.locate(tensor)
        if place is not None:
            return place, None
        free = self._staging[tensor.nbytes]
        staged = free.pop() if free else self.memory.make(tensor.nbytes).data
        if fill:
            staged.view(tensor.dtype).copy_(tensor)
        found = self.memory.locate(staged)
        assert found is not None
        return found, staged

    def give(self, staged: torch.Tensor | None) -> None:
        if staged is not None:
            self._staging[staged.nbytes].append(staged)
