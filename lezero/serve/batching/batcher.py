"""The queue of requests, and what runs next: policy alone, without tensors, threads or a clock.

Requests run in the order in which they came, together with others of their kind, as many as the
plan lets into a step. A request that cannot be answered within the target because of those before
it is refused at once. [Note: long requests] One that by itself takes longer than the target, or a
list that takes longer than half of it, waits in a queue of its own, which runs when no other
request waits. Its items are spread over steps of the usual size, so that others wait for one step
at most.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from lezero.serve.batching.curve import Curve, slowest
from lezero.serve.batching.plan import LATE, Plan, Search, finished, tune

MOST = 256
_MIX = 512
_ENOUGH = 64
_RATIOS = 32
_LATELY = 256
_FEW = 32
_USUALLY = 0.75
_SHIFT, _ANOTHER = 1.15, 1.5
_WATCHED = (1.0, 2.0, 4.0, 8.0)
"""Works, in full steps, whose time is watched: where it changes, another plan may be the best."""
_LOOK = 128
"""Where more waits than a step may hold, one in so many steps takes twice as much, since nobody
would learn otherwise that a larger step takes less than was measured at the start."""


class FullError(Exception):
    """A request that is not taken; retry_s: seconds after which another try may succeed."""

    def __init__(self, reason: str, retry_s: float) -> None:
        super().__init__(reason)
        self.reason, self.retry_s = reason, retry_s


@dataclass(eq=False, slots=True)
class Ask:
    """A request of one or more items. works: of each item. Items of one kind may run together."""

    works: Sequence[float]
    kind: Hashable = None
    payload: object = None
    arrived_s: float = 0.0
    foretold_s: float = 0.0
    """In which it would be answered, as it seemed when it came."""
    begun: int = 0
    """Items that run or have run."""
    is_long: bool = False
    """Whether it waits behind the others."""
    work: float = field(init=False)

    def __post_init__(self) -> None:
        self.work = sum(self.works)


@dataclass(frozen=True, slots=True)
class Batch:
    """A step: (request, item) pairs."""

    items: list[tuple[Ask, int]]
    work: float


class Arrived:
    """What came of late, refused or not: how much work of each kind, and how fast.

    least_s: until there is much of it, what came in less time, as in a burst at the start, is taken
    to have come in so many seconds.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._last: deque[tuple[float, Hashable, float]] = deque()
        self._of_kind: dict[Hashable, tuple[int, float]] = {}

    def add(self, now: float, kind: Hashable, work: float) -> None:
        """Takes in that a request came."""
        self._last.append((now, kind, work))
        count, sum_ = self._of_kind.get(kind, (0, 0.0))
        self._of_kind[kind] = count + 1, sum_ + work
        if len(self._last) > _LATELY:
            _, kind, work = self._last.popleft()
            count, sum_ = self._of_kind.pop(kind)
            if count > 1:
                self._of_kind[kind] = count - 1, sum_ - work

    def work_in(self, seconds: float, now: float, kind: Hashable) -> float:
        """Work of a kind that comes in so many seconds, as it did of late; none of one that came
        once, since nobody knows whether it does again."""
        count, sum_ = self._of_kind.get(kind, (0, 0.0))
        if count < 2:
            return 0.0
        least = self._least_s if len(self._last) < _LATELY else 1e-9
        return sum_ / max(now - self._last[0][0], least) * seconds


class Batcher:
    """Queue and plan of one model.

    curve: seconds of a step. target_s: in which 99% of the requests are to be answered. waiting:
    requests that may wait while a step runs, of short and of long ones each. mix: work of usual
    requests, until there are real ones. plan: one that is kept as it is; without it plans are
    rehearsed, and when the curve or the mix changes again, a little at each call of `search`.
    """

    def __init__(
        self,
        curve: Curve,
        *,
        target_s: float,
        waiting: int = 64,
        most: int = MOST,
        mix: Sequence[float] = (1.0,),
        plan: Plan | None = None,
    ) -> None:
        self.curve, self.target_s, self.most_waiting, self.most = curve, target_s, waiting, most
        self._mix: deque[float] = deque(mix, maxlen=_MIX)
        self._late: deque[bool] = deque(maxlen=_LATELY)
        self._beyond: deque[float] = deque(maxlen=_LATELY)
        self._began, self._steps = 0.0, 0
        self._came = Arrived(target_s)
        self._seen = 0
        self._front: deque[Ask] = deque()
        self._back: deque[Ask] = deque()
        self._busy_until: float | None = None
        self._search: Search[Plan] | None = None
        self._fixed = plan is not None
        self.plans = 1
        """Plans so far."""
        self._basis = copy.deepcopy(curve), list(self._mix)
        """The curve and the mix that the plan, or the one that is looked for, goes by."""
        self._take_plan(plan or finished(tune(*self._basis, target_s, most, waiting=waiting)))

    @property
    def waiting(self) -> int:
        """Requests that wait, in part or whole."""
        return len(self._front) + len(self._back)

    @property
    def full_step_s(self) -> float:
        """How long a step as full as the plan lets it be is expected to take."""
        return self.curve.seconds(self._full_work)

    @property
    def margin(self) -> float:
        """By how much answers are expected to come later than foretold: the more were late, the
        nearer to what the slowest steps of late took beyond the curve, or to what one in four
        answers took beyond what was foretold, whichever is more."""
        share = sum(self._late) / len(self._late) if len(self._late) >= _FEW else 0.0
        if share == 0.0:
            return 1.0
        most = max(self.curve.spread(), slowest(self._beyond, _USUALLY))
        return 1.0 + (most - 1.0) * min(1.0, share / LATE)

    def add(self, ask: Ask, now: float) -> None:
        """Takes a request in; raises `FullError` for one that would come too late, or is one too
        many."""
        ask.arrived_s = now
        own = self.curve.seconds(ask.work)
        ask.is_long = own > self.target_s / (1 if len(ask.works) == 1 else 2)
        queue = self._back if ask.is_long else self._front
        is_busy = self.waiting > 0 or self._busy_until is not None
        if is_busy and len(queue) >= self.most_waiting:
            rest = sum(x.work for x in self._back) if ask.is_long else 0.0
            seconds = self._wait_s(now) + rest / self._full_work * self.full_step_s
            raise FullError(f"{len(queue)} requests wait, as many as may", seconds)
        if ask.is_long:
            self._back.append(ask)
            return
        ask.foretold_s = self._wait_s(now, ask)
        self._came.add(now, ask.kind, ask.work)
        wait = ask.foretold_s * self.margin
        ahead = self._front or self._busy_until is not None
        if ahead and wait > self.target_s:
            reason = f"the answer would take {wait:.3f} s, the target is {self.target_s:g} s"
            raise FullError(reason, wait - self.target_s)
        self._front.append(ask)
        self._mix.append(ask.work)
        self._seen += 1

    def cancel(self, ask: Ask) -> None:
        """Forgets a request; items that run already run to their end."""
        for queue in (self._front, self._back):
            if ask in queue:
                queue.remove(ask)

    def next(self, now: float) -> Batch | float | None:
        """A step to run now, the time at which to ask again, or None when nothing waits."""
        queue = self._front or self._back
        if not queue:
            return None
        items, work, is_full = self._collect(queue)
        until = queue[0].arrived_s + self.plan.delay_s
        if not is_full and now < until and queue is self._front:
            return until
        for ask, item in items:
            ask.begun = item + 1
        for ask in {id(ask): ask for ask, _ in items}.values():
            if ask.begun == len(ask.works):
                queue.remove(ask)
        self._steps += 1
        self._began, self._busy_until = now, now + self.curve.seconds(work)
        return Batch(items, work)

    def done(self, batch: Batch, seconds: float, *, learn: bool = True) -> None:
        """Hears that a step has ended. learn: whether it tells how long steps take."""
        self._busy_until = None
        for ask, item in batch.items:
            if item == len(ask.works) - 1 and not ask.is_long:
                took = self._began + seconds - ask.arrived_s
                self._late.append(took > self.target_s)
                if ask.foretold_s > self.target_s / 2:  # of others nobody asks how late they are
                    self._beyond.append(took / ask.foretold_s)
        if learn:
            self.curve.learn(batch.work, seconds)
        if not self._fixed and (self._search is None or self._is_past):
            self._search = self._new_search()

    @property
    def _is_past(self) -> bool:
        """Whether the search that runs looks for the plan of another machine: a short slowdown is
        often over before its plan is found."""
        before = self._basis[0]
        works = [x * self._full_work for x in _WATCHED]
        changed = [self.curve.seconds(work) / before.seconds(work) for work in works]
        return not all(1 / _ANOTHER < x < _ANOTHER for x in changed)

    @property
    def is_searching(self) -> bool:
        """Whether `search` has something to do."""
        return self._search is not None

    def search(self) -> None:
        """Goes on looking for a plan, for about half a millisecond."""
        if self._search is None:
            return
        try:
            next(self._search)
        except StopIteration as end:
            self._search = None
            self.plans += 1
            self._take_plan(end.value)

    def _collect(self, queue: deque[Ask]) -> tuple[list[tuple[Ask, int]], float, bool]:
        """The items of the next step, their work, and whether no more would fit."""
        kind, work = queue[0].kind, 0.0
        wider = 2 if not self._fixed and self._steps % _LOOK == _LOOK - 1 else 1
        most, most_work = min(wider * self.plan.most, self.most), wider * self.plan.work
        items: list[tuple[Ask, int]] = []
        for ask in queue:
            if ask.kind != kind:
                continue
            for item in range(ask.begun, len(ask.works)):
                more = work + ask.works[item]
                if items and (more > most_work or len(items) >= most):
                    return items, work, True
                items.append((ask, item))
                work = more
        return items, work, work >= most_work or len(items) >= most

    def _wait_s(self, now: float, ask: Ask | None = None) -> float:
        """Seconds until this request, behind those that wait, would be answered; without one, until
        all that wait would be."""
        running = 0.0 if self._busy_until is None else max(0.0, self._busy_until - now)
        before, full = running, self._full_work
        for kind, work, arrived_s in self._steps_to(ask):
            coming = 0.0
            if work < full * (1 - 1e-9):  # so it waits for others, and those that come fill it up
                before = max(before, arrived_s + self.plan.delay_s - now)
                coming = self._came.work_in(before, now, kind)
            before += self.curve.seconds(max(min(work + coming, full), 1e-9))
        return before

    def _steps_to(self, ask: Ask | None) -> list[tuple[Hashable, float, float]]:
        """(kind, work, arrival of the first) of the steps to come, up to the one that ends with
        this request.

        Each begins with the request that has waited longest, and takes others of its kind along.
        """
        full, kinds, works = self._full_work, list[Hashable](), list[float]()
        arrivals: list[float] = []
        latest: dict[Hashable, int] = {}
        for one in (*self._front, *(() if ask is None else (ask,))):
            left = sum(one.works[one.begun :]) if one.begun else one.work
            at = latest.get(one.kind, -1)
            while left > 1e-9 * one.work:
                if at < 0 or full - works[at] <= 1e-9 * full:
                    at = latest[one.kind] = len(works)
                    kinds.append(one.kind)
                    works.append(0.0)
                    arrivals.append(one.arrived_s)
                taken = min(left, full - works[at])
                works[at] += taken
                left -= taken
        if not works:
            return [(None, 0.0, -math.inf)]
        last = len(works) - 1
        end = 1 + (last if ask is None else latest.get(ask.kind, last))
        return list(zip(kinds[:end], works[:end], arrivals[:end], strict=True))

    def _take_plan(self, plan: Plan) -> None:
        curve, mix = self._basis  # what has changed since a search began, the next one is for
        self.plan = plan
        self._mean = sum(mix) / len(mix)
        self._full_work = max(self._mean, min(plan.work, plan.most * self._mean))
        self._planned_s = [curve.seconds(x * self._full_work) for x in _WATCHED]

    def _new_search(self) -> Search[Plan] | None:
        """A search for a plan, where things are no longer what they were when this one was made,
        and it is known how steps vary, which a jump makes forget."""
        mean = sum(self._mix) / len(self._mix)
        now_s = [self.curve.seconds(x * self._full_work) for x in _WATCHED]
        changed = [a / b for a, b in zip(now_s, self._planned_s, strict=True)]
        changed.append(mean / self._mean)
        if self._seen < _ENOUGH or len(self.curve.ratios) < _RATIOS:
            return None
        if all(1 / _SHIFT < x < _SHIFT for x in changed):
            return None
        self._basis = copy.deepcopy(self.curve), list(self._mix)
        basis, waiting = self._basis, self.most_waiting
        return tune(*basis, self.target_s, self.most, self.plan, waiting=waiting)
