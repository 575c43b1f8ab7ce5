"""Which reductions may start when, the same on every rank.

[Note: the order of collectives]
All ranks must start the same collectives in the same order, but gradients come in the order of
each rank's own graph, and not every rank has all of them: experts and branches use what the data
asks for. So reductions start in one fixed order, each when its gradients are there and all before
it have started. Under stage 3 gathers run between them. There a backward is cut at its gates, the
points where a block is gathered, which all ranks pass alike: between two gates only those buckets
may start that the plan names for it, and at the next gate those that are not complete start too,
with zeros for what is missing, as far as the backward of their block is over. While another forward
call of a block may still come in this backward its buckets wait: where it does, gradients are only
complete with it.

The plan is what rank 0 saw in the first backward, told to all: which buckets were complete, or
their block done, after which gate. Until then it is the order of registration, backwards. What is
in no plan starts when backward ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lezero.parallel.zero.gradients import Bucket
    from lezero.parallel.zero.unit import Unit

Gate = tuple[str, int]
"""A unit by name, and how often it was gathered before in this backward."""
START: Gate = ("", -1)


class Plan:
    """`windows`: for each gate the buckets that may start after it; `START` before the first.
    `gated`: there are gates (stage 3)."""

    def __init__(
        self, buckets: Sequence[Bucket], windows: dict[Gate, list[Bucket]], gated: bool
    ) -> None:
        self.buckets, self.windows, self.gated = list(buckets), windows, gated

    @classmethod
    def first(cls, buckets: Sequence[Bucket], gated: bool) -> Plan:
        """Of a model that has not run: each block's buckets after its gate, and those of the root
        where the order of `buckets` has them."""
        windows: dict[Gate, list[Bucket]] = {START: []}
        gate = START
        for bucket in buckets:
            unit = bucket.segment.unit
            if gated and not unit.is_root:
                gate = unit.name, 0
            windows.setdefault(gate, []).append(bucket)
        return cls(buckets, windows, gated)

    def seen(self, record: Sequence[tuple[str, int, Sequence[str]]]) -> Plan:
        """The plan that a record of rank 0 (`Recorder.found`) gives."""
        named = {bucket.segment.key: bucket for bucket in self.buckets}
        windows = {(unit, at): [named.pop(key) for key in keys] for unit, at, keys in record}
        *_, end = windows
        last: dict[str, Gate] = {name: (name, at) for name, at in windows}
        for bucket in named.values():  # of a block that did not run, or not complete on rank 0
            unit = bucket.segment.unit
            gate = end if unit.is_root or end == START else last.get(unit.name, (unit.name, 0))
            windows.setdefault(gate, []).append(bucket)
        return Plan(self.buckets, windows, self.gated)


class Recorder:
    """What rank 0 notes in the first backward."""

    def __init__(self) -> None:
        self._windows: list[tuple[Gate, list[Bucket]]] = [(START, [])]
        self._noted: set[Bucket] = set()

    def note(self, bucket: Bucket) -> None:
        """All gradients of `bucket` are there, or its block is done."""
        if bucket not in self._noted:
            self._noted.add(bucket)
            self._windows[-1][1].append(bucket)

    def passed(self, gate: Gate) -> None:
        self._windows.append((gate, []))

    def found(self) -> list[tuple[str, int, list[str]]]:
        """By gate, the keys of the buckets, in plain data."""
        return [(*gate, [b.segment.key for b in noted]) for gate, noted in self._windows]


class Turns:
    """Which buckets may start now, in one backward that follows `plan`."""

    def __init__(self, plan: Plan, recorder: Recorder | None) -> None:
        self._plan, self._recorder = plan, recorder
        self._queue: deque[Bucket] = deque(plan.windows.get(START, ()))
        self._passed: Counter[str] = Counter()

    def came(self, bucket: Bucket) -> None:
        """All gradients of `bucket` are there."""
        if self._recorder is not None:
            self._recorder.note(bucket)

    def launch(self, *, late: bool = False) -> None:
        """Starts what may start: complete ones; `late`: also those whose block is done."""
        while self._queue:
            bucket, unit = self._queue[0], self._queue[0].segment.unit
            complete = bucket.ready and not (self._plan.gated and unit.awaited)
            if not (complete or (late and unit.done)):
                return
            self._queue.popleft()
            if bucket.trainable and not bucket.sent:  # frozen ones have no gradients to sum
                bucket.launch()

    def gate(self, unit: Unit) -> None:
        """`unit` is about to be gathered."""
        self.launch(late=True)
        gate = unit.name, self._passed[unit.name]
        self._passed[unit.name] += 1
        if self._recorder is not None:
            for bucket in self._plan.buckets:
                other = bucket.segment.unit
                if bucket.trainable and other.done and not other.is_root:
                    self._recorder.note(bucket)
            self._recorder.passed(gate)
        waiting = set(self._queue)
        self._queue += (b for b in self._plan.windows.get(gate, ()) if b not in waiting)

    def rest(self) -> list[Bucket]:
        """What has not started when backward ends, in one order on every rank."""
        left = dict.fromkeys([*self._queue, *self._plan.buckets])
        return [bucket for bucket in left if bucket.trainable and not bucket.sent]
