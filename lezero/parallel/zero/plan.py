"""Which reductions may start when, the same on every rank.

[Note: the order of collectives]
All ranks must start the same collectives in the same order, but gradients come in the order of
each rank's own graph, and not every rank has all of them: experts and branches use what the data
asks for. So reductions start in one fixed order, each when its gradients are there and all before
it have started. Under stage 3 gathers run between them. There a backward is cut at its gates, the
points where a block is gathered, which all ranks pass alike: between two gates only those buckets
may start that the plan names for it, and at the next gate the others of them start too, with zeros
for what is missing. A gradient that comes after that is reduced in the end, once more.

The plan is what rank 0 saw in a backward, told to all: after which gate the backward of a block was
over for the last time, and after which all gradients of a bucket of the root had come. While it is
recorded, buckets start at gates only, in the order of registration, backwards, each once the
backward of its block is over; a block is expected to be gathered as often as calls of it wait for
their backward on rank 0. What is in no plan starts when backward ends.

Nothing here may ask for what a rank alone knows: which gradients came, which graphs still live.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lezero.parallel.zero.gradients import Bucket
    from lezero.parallel.zero.unit import Unit

Gate = tuple[str, int]
"""A unit by name, and how often it was gathered before in this backward."""
START: Gate = ("", -1)
Noted = tuple[str, int, list[str]]
"""A gate, and the keys of the buckets that may start after it."""


class Plan:
    """`windows`: for each gate the buckets that may start after it; `START` before the first.
    `fixed`: they start before the next gate in any case."""

    def __init__(
        self, buckets: Sequence[Bucket], windows: dict[Gate, list[Bucket]], fixed: bool
    ) -> None:
        self.buckets, self.windows, self.fixed = list(buckets), windows, fixed

    @classmethod
    def first(cls, buckets: Sequence[Bucket], calls: Mapping[str, int] | None) -> Plan:
        """Of a model that has not run: each block's buckets after its gate, and those of the root
        where the order of `buckets` has them. `calls`: of each unit, how many wait for their
        backward; None without gates (stages 0 to 2)."""
        windows: dict[Gate, list[Bucket]] = {START: []}
        gate = START if calls is None else ("", 0)
        for bucket in buckets:
            unit = bucket.segment.unit
            if calls is not None:
                if unit.is_root and calls[unit.name] > 1:
                    continue  # no gate tells that the last of them has begun
                if not unit.is_root:
                    gate = unit.name, max(calls[unit.name], 1) - 1
            windows.setdefault(gate, []).append(bucket)
        return cls(buckets, windows, fixed=calls is None)

    @classmethod
    def seen(cls, buckets: Sequence[Bucket], record: Sequence[Noted]) -> Plan:
        """The plan that a record of rank 0 (`Recorder.found`) gives."""
        named = {bucket.segment.key: bucket for bucket in buckets}
        windows = {(unit, at): [named.pop(key) for key in keys] for unit, at, keys in record}
        *_, end = windows
        last: dict[str, Gate] = {name: (name, at) for name, at in windows}
        for bucket in named.values():  # of a block that did not run, or not complete on rank 0
            unit = bucket.segment.unit
            gate = end if unit.is_root or end == START else last.get(unit.name, (unit.name, 0))
            windows.setdefault(gate, []).append(bucket)
        return cls(buckets, windows, fixed=True)


class Recorder:
    """What rank 0 notes in a backward."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = [bucket for bucket in buckets if bucket.trainable]
        self._gates = [START]
        self._at: dict[Bucket, Gate] = {}
        self._came: dict[Bucket, None] = {}

    def came(self, bucket: Bucket) -> None:
        """All gradients of `bucket` are there."""
        self._came.pop(bucket, None)
        self._came[bucket] = None
        if bucket.segment.unit.over:
            self._at[bucket] = self._gates[-1]

    def passed(self, gate: Gate) -> None:
        for bucket in self._buckets:
            unit = bucket.segment.unit
            if unit.name == gate[0] and not unit.is_root:
                self._at.pop(bucket, None)  # its backward goes on
            elif unit.over and not unit.is_root:
                self._at.setdefault(bucket, self._gates[-1])
        self._gates.append(gate)

    def found(self) -> list[Noted]:
        """By gate, the keys of the buckets, in plain data; backward is over."""
        for bucket in self._came:
            self._at.setdefault(bucket, self._gates[-1])
        order = [b for b in dict.fromkeys([*self._came, *self._at]) if b in self._at]
        return [(*g, [b.segment.key for b in order if self._at[b] == g]) for g in self._gates]


class Turns:
    """Which buckets may start now, in one backward that follows `plan`."""

    def __init__(self, plan: Plan, recorder: Recorder | None) -> None:
        self._plan, self._recorder = plan, recorder
        self._queue: deque[Bucket] = deque(plan.windows.get(START, ()))
        self._passed: Counter[str] = Counter()

    def came(self, bucket: Bucket) -> None:
        """All gradients of `bucket` are there."""
        if self._recorder is not None:
            self._recorder.came(bucket)

    def launch(self) -> None:
        """Starts those whose gradients are there, up to the first that waits."""
        while self._plan.fixed and self._queue and self._queue[0].ready:
            self._start(self._queue.popleft())

    def gate(self, unit: Unit) -> None:
        """`unit` is about to be gathered."""
        while self._queue and (self._plan.fixed or self._queue[0].segment.unit.over):
            self._start(self._queue.popleft())
        gate = unit.name, self._passed[unit.name]
        self._passed[unit.name] += 1
        if self._recorder is not None:
            self._recorder.passed(gate)
        self._queue += self._plan.windows.get(gate, ())

    def rest(self) -> list[Bucket]:
        """What has not started when backward ends, in one order on every rank."""
        left = dict.fromkeys([*self._queue, *self._plan.buckets])
        return [bucket for bucket in left if bucket.trainable and not bucket.sent]

    def _start(self, bucket: Bucket) -> None:
        if bucket.trainable and not bucket.sent:  # frozen ones have no gradients to sum
            bucket.launch()
