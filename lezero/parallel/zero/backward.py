"""What happens while autograd runs backward: gradients are collected, reduced and deposited.

[Note: the order of reductions]
All ranks must start the same reductions in the same order, but gradients come in the order of
each rank's own graph. So there is one fixed order, and a reduction starts when its gradients are
there and all before it have started. At first the order is that of registration, backwards; after
the first backward it is the order in which gradients came on rank 0, told to all. What has not come
when backward ends (unused parameters) is reduced as zeros, and a parameter that no rank used keeps
the gradient it had (None, usually), which the ranks agree on with one small exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.autograd import Variable

from lezero.core import groups
from lezero.parallel.zero.gradients import Bucket, Lent
from lezero.parallel.zero.held import Held


class Backward:
    """Drives the buckets of one sharded model. `sync` False collects without reducing; with `mute`
    this rank's gradients count as zeros, whatever they are.

    `on_end` is called when a backward is over, to release the units; `on_sums` after it, where the
    gradients were summed.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        lent: Lent,
        helds: Sequence[Held],
        on_end: Callable[[], None],
        on_sums: Callable[[], None],
    ) -> None:
        self.order = list(buckets)
        self.lent, self.helds = lent, list(helds)
        self.on_end, self.on_sums = on_end, on_sums
        self.sync, self.mute = True, False
        self.active = False
        self._of = {held: bucket for bucket in buckets for held in bucket.segment.helds}
        self._next = 0
        self._came: list[Bucket] | None = []
        self._aside: dict[Held, torch.Tensor | None] = {}

    def begin(self) -> None:
        """Called by whatever notices first that a backward runs."""
        if not self.active:
            self.active = True
            Variable._execution_engine.queue_callback(self._end)
            for bucket in self.order:
                bucket.unmark()

    def set_aside(self, held: Held) -> None:
        """Autograd is about to add to `held.sharded.grad`, where sums over the ranks may be."""
        if not self._aside:  # `autograd.grad` comes here too, and then adds nothing
            Variable._execution_engine.queue_callback(self._put_back)
        self._aside[held], held.sharded.grad = held.sharded.grad, None

    def _put_back(self) -> None:
        for held, gradient in self._aside.items():
            held.sharded.grad = gradient
        self._aside.clear()

    @torch.no_grad()
    def arrived(self, held: Held, leaf: torch.Tensor) -> None:
        """A gradient of `held` is in `leaf.grad`: moves it to its bucket."""
        gradient, leaf.grad = leaf.grad, self._aside.pop(held, None)
        self.begin()
        assert gradient is not None
        if self.mute:
            gradient = torch.zeros_like(gradient)
        held.used = True
        bucket = self._of[held]
        bucket.write(held, gradient, keep=not self.sync)
        if self.sync and bucket.ready:
            if self._came is not None and bucket not in self._came:
                self._came.append(bucket)
            self._launch_ready()

    def recover(self) -> None:
        """Puts everything back after a backward that raised: its gradients are dropped."""
        for bucket in self.order:
            bucket.unmark()
            bucket.drop()
        for held in self.helds:
            held.used = False
            if held.full is not None:
                held.full.grad = None
        self.lent.in_flight.clear()
        self._next, self.active = 0, False

    def _launch_ready(self) -> None:
        while self._next < len(self.order):
            bucket = self.order[self._next]
            if bucket.trainable:  # frozen ones have no gradients to sum
                if not bucket.ready:
                    break
                bucket.launch()
            self._next += 1

    @torch.no_grad()
    def _end(self) -> None:
        """Runs when autograd has finished: reduces the rest, deposits, releases the units."""
        if not self.active:
            return
        if self.sync:
            self._reduce_rest()
        for bucket in self.order:
            bucket.came.clear()
            if not self.sync:
                bucket.mark()
        self.active = False
        self.on_end()
        if self.sync:
            self.on_sums()

    def _reduce_rest(self) -> None:
        for bucket in self.order[self._next :]:
            if bucket.trainable:
                bucket.launch()
        agreed = self._start_agreement()
        second = [b for b in self.order if not b.launched and b.flat is not None]
        while self.lent.in_flight:
            self.lent.in_flight[0].finish()
        for bucket in second:  # a block that ran in several backwards of its own (recompute)
            bucket.launch()
        while self.lent.in_flight:
            self.lent.in_flight[0].finish()
        used = self._agreement(*agreed)
        for bucket in self.order:
            bucket.deposit(used)
        for held in self.helds:
            held.used = False
        self._next = 0
        self._settle_order()

    def _start_agreement(self) -> tuple[torch.Tensor, dist.Work | None]:
        flags = torch.tensor([float(held.used) for held in self.helds])
        if groups.world_size() == 1:
            return flags, None
        flags = flags.to(self.lent.lines.place)
        return flags, dist.all_reduce(flags, async_op=True)

    def _agreement(self, flags: torch.Tensor, work: dist.Work | None) -> set[Held]:
        if work is not None:
            with groups.naming_lost_ranks():
                work.wait()
        return {held for held, count in zip(self.helds, flags.tolist(), strict=True) if count}

    def _settle_order(self) -> None:
        if self._came is None:
            return
        names = groups.broadcast_object([b.segment.key for b in self._came])
        by_name = {b.segment.key: b for b in self.order}
        first = [by_name[name] for name in names]
        self.order = first + [b for b in self.order if b not in first]
        self._came = None
