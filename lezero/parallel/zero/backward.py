"""What happens while autograd runs backward: gradients are collected, reduced and deposited.

What has not come when backward ends (unused parameters) is reduced as zeros, and a parameter that
no rank used keeps the gradient it had (None, usually), which the ranks agree on with one small
exchange. It also tells whether on some rank a gradient came after its reduction had started: it is
reduced in a second one. In which order reductions start is in `plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from lezero.core import groups, in_flight, observer
from lezero.core.function_modes import past_modes
from lezero.parallel.zero.gradients import Bucket, Lent, agree_on_scalars
from lezero.parallel.zero.held import Held
from lezero.parallel.zero.plan import Plan, Recorder, Turns

if TYPE_CHECKING:
    from lezero.parallel.zero.unit import Unit


class Backward:
    """Drives the buckets of one sharded model. `sync` False collects without reducing; with `mute`
    this rank's gradients count as zeros, whatever they are. `alike`: the caller weighs the losses
    of all ranks alike.

    `gated`: blocks are gathered in backward (stage 3). `on_end` is called when a backward is over,
    to release the units; `on_sums` after it, where the gradients were summed. `due`: the model has
    computed with gradients, and no backward has come since.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        lent: Lent,
        helds: Sequence[Held],
        on_end: Callable[[], None],
        on_sums: Callable[[], None],
        *,
        gated: bool,
    ) -> None:
        self.buckets = list(buckets)
        self.lent, self.helds = lent, list(helds)
        self.on_end, self.on_sums = on_end, on_sums
        self.sync, self.mute, self.alike = True, False, True
        self.active = self.due = False
        self._of = {held: bucket for bucket in buckets for held in bucket.segment.helds}
        self._gated = gated
        self._plan: Plan | None = None
        self._renewals = 2
        self._recorder: Recorder | None = None
        self._turns: Turns | None = None
        self._aside: dict[Held, torch.Tensor | None] = {}
        self._collecting: set[Bucket] = set()  # on some rank, maybe: every rank knows the same

    def begin(self) -> None:
        """Called by whatever notices first that a backward runs."""
        if not self.active:
            self.active, self.due = True, False
            Variable._execution_engine.queue_callback(self._end)
            for bucket in self.buckets:
                bucket.unmark()
            if self.sync:
                self._begin_turns()
            else:
                self._collecting.update(bucket for bucket in self.buckets if bucket.trainable)
                self.lent.wide = True

    def _begin_turns(self) -> None:
        if self._plan is None:
            calls = self._told(self._calls()) if self._gated else None
            self._recorder = Recorder(self.buckets)
            self._turns = Turns(Plan.first(self.buckets, calls), self._recorder)
        else:
            self._turns = Turns(self._plan, None)

    def _calls(self) -> dict[str, int]:
        """For each unit, how many of its calls may have their backward now."""
        units = {bucket.segment.unit for bucket in self.buckets}
        return {unit.name: len(unit.awaited) for unit in units}

    def gate(self, unit: Unit) -> None:
        """`unit` is about to be gathered, while backward runs."""
        if self._turns is not None and self._gated:
            self._turns.gate(unit)

    def launch(self) -> None:
        """Starts the reductions that may start."""
        if self._turns is not None:
            self._turns.launch()

    def set_aside(self, held: Held, _: torch.Tensor) -> None:
        """Autograd is about to add to `held.sharded.grad`, where sums over the ranks may be."""
        if not self._aside:  # `autograd.grad` comes here too, and then adds nothing
            Variable._execution_engine.queue_callback(self._put_back)
        self._aside[held], held.sharded.grad = held.sharded.grad, None

    def _put_back(self) -> None:
        for held, gradient in self._aside.items():
            held.sharded.grad = gradient
        self._aside.clear()

    @past_modes
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
        bucket.write(held, gradient)
        if self._turns is not None and bucket.ready:
            self._turns.came(bucket)
            self._turns.launch()

    def recover(self) -> None:
        """Puts everything back after a backward that raised: its gradients are dropped, but for
        sums that stages 2 and 3 had added to gradients that were there."""
        for bucket in self.buckets:
            bucket.unmark()
            bucket.drop()
        for held in self.helds:
            held.used = False
            if held.full is not None:
                held.full.grad = None
        self.lent.in_flight.clear()
        self._turns, self.active = None, False

    @past_modes
    @torch.no_grad()
    def _end(self) -> None:
        """Runs when autograd has finished: reduces the rest, deposits, releases the units."""
        if not self.active:
            return
        if self._turns is not None:
            self._reduce_rest(self._turns)
        for bucket in self.buckets:
            bucket.came.clear()
            bucket.sent = False
            bucket.mark()  # without `sync`; and where frozen ones keep what was collected before
        summed, self._turns, self.active = self._turns is not None, None, False
        self.on_end()
        if summed:
            self.on_sums()

    def _reduce_rest(self, turns: Turns) -> None:
        for bucket in turns.rest():
            bucket.launch()
        agreed = self._start_agreement()
        self._finish_all()
        used, late = self._agreement(*agreed)
        for bucket in late:
            bucket.launch()
        self._finish_all()
        agree_on_scalars(self.lent.lines, self.buckets)
        self._collecting = {bucket for bucket in self._collecting if not bucket.trainable}
        self.lent.wide = bool(self._collecting)  # of frozen ones nothing was reduced
        for bucket in self.buckets:
            bucket.deposit(used)
        for held, bucket in self._of.items():
            held.used = held in bucket.written
        if self._recorder is not None:
            self._plan = Plan.seen(self.buckets, self._told(self._recorder.found()))
            self._recorder = None
        elif late and self._renewals:  # this backward is not like the one that was recorded
            self._plan = None
            self._renewals -= 1

    def _finish_all(self) -> None:
        while self.lent.in_flight:
            self.lent.in_flight[0].finish()

    def _start_agreement(self) -> tuple[torch.Tensor, dist.Work | None]:
        asked = [held.used for held in self.helds] + [bucket.late for bucket in self.buckets]
        flags = torch.tensor([float(one) for one in asked])
        if groups.world_size() == 1:
            return flags, None
        flags, watcher = flags.to(self.lent.lines.place), observer.current()
        if watcher is not None:
            watcher.enter("all_reduce", flags.shape, flags.dtype, "which gradients came")
        return flags, dist.all_reduce(flags, async_op=True)

    def _agreement(
        self, flags: torch.Tensor, work: dist.Work | None
    ) -> tuple[set[Held], list[Bucket]]:
        """Which parameters any rank used, and which buckets are late on any."""
        watcher = observer.current()
        if work is not None:
            with groups.naming_lost_ranks():
                in_flight.wait(work)
            if watcher is not None:
                watcher.leave()
        counts = flags.tolist()
        used = {held for held, count in zip(self.helds, counts, strict=False) if count}
        late = zip(self.buckets, counts[len(self.helds) :], strict=True)
        return used, [bucket for bucket, count in late if count]

    def _told(self, found: Any) -> Any:
        """What rank 0 found, on every rank."""
        return groups.broadcast_object(found)
