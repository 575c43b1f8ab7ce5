"""The gradients of one segment: collected while backward runs, summed over the ranks, deposited.

The sum over the shard axis (reduce-scatter) is followed, where there is one, by the sum over the
replicate axis (all-reduce), and multiplied by 1 / world in the end, at every stage alike.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lezero.comm.link import Link
from lezero.comm.pending import Pending
from lezero.parallel.zero.held import Held, Mark, distributed, local
from lezero.parallel.zero.lines import Lines
from lezero.parallel.zero.segment import Segment


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of type `dtype` are summed and kept locally."""
    return torch.promote_types(dtype, torch.float32)


class Lent:
    """Gradient buffers that segments of one size share (stages 2 and 3), or own (`limit` None).

    `limit`: how many of one size there are before a taker first waits for a reduction in flight.
    Where finishing one starts a collective (the sum over the replicas), only the next reduction of
    that size waits for it: takers come in another order on each rank. `wide`: none of 16 bits is
    lent, since some rank may have collected gradients under `no_sync`, which are wide. `adds_up`:
    whether several backwards add up to one step: as in the steps before, True until the first.
    """

    def __init__(self, lines: Lines, limit: int | None) -> None:
        self.lines, self.limit = lines, limit
        self.in_turn = limit is not None and lines.shard is not None and lines.replicate is not None
        self.wide = False
        self.adds_up, self.added = True, False
        self.in_flight: deque[Bucket] = deque()
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._made: dict[tuple[int, torch.dtype], int] = defaultdict(int)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        key = (numel, dtype)
        limit = None if self.in_turn else self.limit
        while not self._free[key] and limit is not None and self._made[key] >= limit:
            if not any(self._holds(bucket, key) for bucket in self.in_flight):
                break
            self.in_flight[0].finish()
        if self._free[key]:
            return self._free[key].pop()
        self._made[key] += 1
        return self.lines.buffer(numel, dtype)

    def give(self, tensor: torch.Tensor) -> None:
        self._free[tensor.numel(), tensor.dtype].append(tensor)

    def make_way(self, flat: torch.Tensor) -> None:
        """`flat` is about to be reduced."""
        key = (flat.numel(), flat.dtype)
        while self.in_turn and any(self._holds(bucket, key) for bucket in self.in_flight):
            self.in_flight[0].finish()

    @staticmethod
    def _holds(bucket: Bucket, key: tuple[int, torch.dtype]) -> bool:
        flight = bucket.flight
        held = (flight.flat, flight.sum) if flight is not None else ()
        return any((t.numel(), t.dtype) == key for t in held)


class Flight(NamedTuple):
    """A sum over the ranks under way, of `flat` into `sum`; `direct`: that is the gradients' own
    memory."""

    flat: torch.Tensor
    sum: torch.Tensor
    direct: bool
    pending: Pending | None


class Bucket:
    """The gradients of one segment, from the first that comes until they are deposited.

    `written`: whose gradient is in `flat`; `came`: whose came in this backward; `sent`: a reduction
    has started in this backward, `flight` is the one under way; `summed`: a sum of this backward
    lies in the gradients' memory already, not yet deposited; `waiting`: whose lies in memory of the
    bucket, not in a gradient that was there.
    """

    def __init__(self, segment: Segment, lines: Lines, lent: Lent) -> None:
        self.segment, self.lines, self.lent = segment, lines, lent
        self.flat: torch.Tensor | None = None
        self.written: set[Held] = set()
        self.came: set[Held] = set()
        self.waiting: set[Held] = set()
        self.sent = self.summed = False
        self.flight: Flight | None = None
        self._direct = False
        self._own: torch.Tensor | None = None
        replicas = lines.replicate.size if lines.replicate else 1
        self._length = -(-segment.layout.chunk // replicas) * replicas
        self._wide = wide(segment.compute)
        self._spans = segment.layout.spans()
        self._gaps = list(self._padding())
        self._grads: list[torch.Tensor] = []
        self._totals: dict[Held, torch.Tensor] = {}
        # Their gradients get the same strides, as autograd's have: fused optimizers rely on that.
        self._strided = segment.link is None and not all(
            held.sharded.is_contiguous() for held in segment.helds
        )

    @property
    def trainable(self) -> list[Held]:
        return [held for held in self.segment.helds if held.sharded.requires_grad]

    @property
    def ready(self) -> bool:
        return all(held in self.came for held in self.trainable)

    @property
    def late(self) -> bool:
        """A gradient came after the reduction had started."""
        return self.sent and self.flat is not None

    def write(self, held: Held, gradient: torch.Tensor) -> None:
        """Takes in a gradient of the whole parameter."""
        flat = self._take()
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        again = held in self.written
        for inside, outside in self.segment.layout.pieces(flat, held.place, gradient):
            if again:
                inside.add_(outside)
            else:
                inside.copy_(outside)
        self.written.add(held)
        self.came.add(held)

    def launch(self) -> None:
        """Starts the sum over the ranks; parameters without a gradient count as zeros."""
        flat = self._take()
        layout = self.segment.layout
        for held in self.segment.helds:
            if held not in self.written:
                shape = torch.empty(held.rows.shape, device="meta")
                for inside, _ in layout.pieces(flat, held.place, shape):
                    inside.zero_()
        self.lent.make_way(flat)
        direct, link = self._direct, self.segment.link
        if link is None:
            total, pending = flat, self._replicate(flat, layout.chunk)
        else:
            direct = self._can_deposit_directly()
            total = self._own_grads() if direct else self._temporary()
            out = total[: layout.chunk]
            key = self.segment.key
            pending = link.reduce_scatter(flat, out, key=key, spans=self._spans)
        self.flight, self.sent = Flight(flat, total, direct, pending), True
        self.flat, self._direct = None, False
        self.written.clear()
        self.lent.in_flight.append(self)

    def finish(self) -> None:
        """Waits for the sum and deposits it; buckets finish in the order of their launch."""
        lent, flight = self.lent, self.flight
        assert lent.in_flight[0] is self
        assert flight is not None
        if flight.pending is not None:
            flight.pending.wait()
        if self.segment.link is not None:
            second = self._replicate(flight.sum, self.segment.layout.chunk)
            if second is not None:
                second.wait()
        lent.in_flight.popleft()
        if self.lines.world > 1:
            flight.sum.mul_(1.0 / self.lines.world)
        if flight.direct:
            self.waiting.update(self.segment.helds)
        else:
            self._add(flight.sum)
        self.summed, self.flight = True, None
        self._give_back(flight.flat, flight.sum)

    def scalars(self) -> list[torch.Tensor]:
        """The sums of this backward for parameters without dims, as memory to be changed."""
        if not self.summed or self.segment.link is None:
            return []
        found = []
        for held, mine in zip(self.segment.helds, self._gradients(), strict=True):
            if not held.rows.shape:
                gradient = None if held in self.waiting else held.local_grad()
                found.append(local(mine) if gradient is None else gradient)
        return found

    def deposit(self, used: set[Held]) -> None:
        """Gives the parameters in `used` their gradient (their memory has it already).

        Where autograd has given one of its own meanwhile (of a penalty on the shards), both count.
        """
        for held, mine in zip(self.segment.helds, self._grads, strict=False):
            if held in used and held in self.waiting:
                there = held.local_grad()
                if there is None:
                    held.sharded.grad = mine
                elif held.sharded.grad is not mine:
                    self._add_to(held, there, local(mine))
        self.summed = False
        self.waiting.clear()
        self.came.clear()

    def mark(self) -> None:
        """Backward ended without reducing: what is in `flat` stays until the user drops it."""
        if not self.written:
            return
        for held, mine in zip(self.segment.helds, self._gradients(), strict=True):
            if held in self.written:
                gradient, stands_in = held.sharded.grad, held.sharded.grad is None
                if gradient is None:
                    if self.flat is not self._own:
                        local(mine).zero_()
                    gradient = held.sharded.grad = mine
                held.mark = Mark.put(gradient, stands_in=stands_in)

    def unmark(self) -> None:
        """The next backward begins: forgets what the user has dropped with `zero_grad`."""
        for held in self.segment.helds:
            if held.mark is None:
                continue
            mark, held.mark = held.mark, None
            if mark.take(held.sharded.grad):
                self.written.discard(held)
                held.used = False
            if mark.stands_in and held.sharded.grad is mark.gradient:
                held.sharded.grad = None

    def drop(self) -> None:
        """Forgets what was collected, after a backward that failed."""
        if self.flight is not None:
            if self.flight.pending is not None:
                self.flight.pending.wait()
            self._give_back(self.flight.flat, self.flight.sum)
        self._give_back(self.flat)
        self.flat = self.flight = None
        self._direct = self.sent = self.summed = False
        self.written.clear()
        self.came.clear()
        self.waiting.clear()

    def _give_back(self, *tensors: torch.Tensor | None) -> None:
        for tensor in {id(t): t for t in tensors if t is not None}.values():
            if tensor is not self._own:
                self.lent.give(tensor)

    def _take(self) -> torch.Tensor:
        if self.flat is not None:
            return self.flat
        segment, layout = self.segment, self.segment.layout
        if segment.link is None:
            self._direct = self._can_deposit_directly()
            self.flat = self._own_grads() if self._direct else self._temporary()
            return self.flat
        carried = segment.compute in self.lines.types and not self.lent.wide
        self.flat = self.lent.take(layout.numel, segment.compute if carried else self._wide)
        if layout.contiguous:
            self.flat[layout.places[0].rows.numel :].zero_()
        else:
            self.flat.zero_()
        return self.flat

    def _padding(self) -> Iterator[tuple[int, int]]:
        """Where no parameter lies in a sum. What a codec decodes there must not be encoded again:
        it would spread in the block that it shares with values, a NaN for ever."""
        layout, rank = self.segment.layout, self.segment.rank
        spots = [(p.at, p.rows) for p in layout.places]
        ends = [(at + math.prod(rows.shard_shape(rank)), at + rows.chunk) for at, rows in spots]
        for begin, end in [*ends, (layout.chunk, self._length)]:
            if begin < end:
                yield begin, end

    def _replicate(self, flat: torch.Tensor, chunk: int) -> Pending | None:
        link: Link | None = self.lines.replicate
        if link is None:
            return None
        for begin, end in self._gaps:
            flat[begin:end].zero_()
        first = self.segment.rank * chunk
        spans = tuple(
            span._replace(at=span.at - first)
            for span in self._spans
            if first <= span.at < first + chunk
        )
        return link.all_reduce(flat, key=self.segment.key, spans=spans)

    def _can_deposit_directly(self) -> bool:
        """The sum can land in the gradients' own memory: right type, and nothing to add to."""
        free = all(held.sharded.grad is None for held in self.segment.helds)
        wide = self.segment.master == self._wide and not self._strided
        return free and not self.summed and self.flight is None and wide

    def _gradients(self) -> list[torch.Tensor]:
        """The gradients of the parameters, in memory made once."""
        if not self._strided:
            self._own_grads()
        elif not self._grads:
            self._grads = [torch.empty_like(held.sharded) for held in self.segment.helds]
        return self._grads

    def _own_grads(self) -> torch.Tensor:
        """The memory of contiguous gradients, one behind the other."""
        if self._own is None:
            segment, layout = self.segment, self.segment.layout
            self._own = self.lines.buffer(self._length, segment.master, replicate=True)
            for held, place in zip(segment.helds, layout.places, strict=True):
                # .data: a version counter for each, not one that all of a segment share
                rows = layout.shard(self._own, place, segment.rank).data
                self._grads.append(distributed(rows, held.rows, self.lines.mesh))
        return self._own

    def _temporary(self) -> torch.Tensor:
        return self.lent.take(self._length, self._wide)

    def _add(self, total: torch.Tensor) -> None:
        """Adds the sum to the gradients that are there, and fills those that are not."""
        for held, mine in zip(self.segment.helds, self._gradients(), strict=True):
            new = self.segment.layout.shard(total, held.place, self.segment.rank)
            there = held.local_grad()
            if held in self.waiting:
                self._add_to(held, local(mine), new)
            elif there is None:
                local(mine).copy_(new)
                if self.lent.adds_up and local(mine).dtype != new.dtype:
                    self._totals[held] = new.clone()
                self.waiting.add(held)
            else:
                self._add_to(held, there, new)

    def _add_to(self, held: Held, there: torch.Tensor, new: torch.Tensor) -> None:
        if there.dtype == new.dtype:
            there.add_(new)
        else:
            self._add_wide(held, there, new)

    def forget_totals(self) -> None:
        """Nothing will be added to the gradients that are there."""
        self._totals.clear()

    def _add_wide(self, held: Held, there: torch.Tensor, new: torch.Tensor) -> None:
        """Beside a gradient of 16 bits stays what it was rounded from, as long as it adds up.

        By value: torch's foreach functions change DTensors, and no version counter moves.
        """
        total = self._totals.get(held)
        if total is None or not _equal(total.to(there.dtype), there):
            total = there.to(new.dtype)
        total.add_(new)
        there.copy_(total)
        self._totals[held] = total
        self.lent.adds_up = self.lent.added = True


@torch.no_grad()
def agree_on_scalars(lines: Lines, buckets: list[Bucket]) -> None:
    """Gives all ranks the first one's sums for parameters without dims.

    Each lies in the chunks of all ranks; a rank does not encode its own, so sums differ a little.
    """
    if lines.shard is None or lines.wire.codec == "none":
        return
    found = [scalar for bucket in buckets for scalar in bucket.scalars()]
    if found:
        sums = torch.stack([scalar.double() for scalar in found])
        lines.take_first(sums)
        for scalar, value in zip(found, sums, strict=True):
            # One of 16 bits is left alone where it is right: `_add_wide` keeps more of it.
            if scalar.dtype.itemsize > 2 or not _equal(scalar.double(), value):
                scalar.copy_(value)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tensors without values, of a step that is forecast, are what a usual step finds: equal."""
    return isinstance(one, FakeTensor) or torch.equal(one, other)
