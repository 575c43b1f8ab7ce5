"""Which batch and which delay: candidates are rehearsed in virtual time, and the best one is taken.

A plan is judged by the highest rate of arrivals at which 99% of the requests are answered within
the target. All plans meet the same arrivals (a Poisson process of a fixed seed, with the sizes seen
of late) on the curve that was learnt, with the noise seen of late.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from lezero.serve.batching.curve import Curve

T = TypeVar("T")
LATE = 0.01
"""Share of requests that may take longer than the target."""
_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
_DELAYS = (1 / 16, 1 / 8, 1 / 4)
_WORTH = 1.02
_TOGETHER = 8
_ARRIVALS = 3000
_CLOSE = 1.01
_SLOW = 0.002
"""Of what steps in a row would hold: the lowest rate that is tried."""
_PIECE = 200
"""Steps that are rehearsed in one piece: about half a millisecond."""

Search = Generator[None, None, T]
"""Work that is done in small pieces: each `next` does one, and the outcome is what it returns."""


@dataclass(frozen=True)
class Tried:
    """A candidate. rate: requests a second that it holds; None: fewer than `best`, those that the
    best one before it holds."""

    count: int
    delay_s: float
    rate: float | None
    best: float

    @property
    def name(self) -> str:
        """For people."""
        return f"up to {self.count} a step, delay {1000 * self.delay_s:.3g} ms"


@dataclass(frozen=True)
class Plan:
    """What a step holds, and how long a request may wait for others.

    most, work: items of a step at most, and their work. delay_s: a step that is not full waits
    until its oldest request is so old. rate: requests a second of which 99% are answered in time,
    as rehearsed; None where nobody rehearsed it. tried: what it was chosen from, in order.
    """

    most: int
    work: float = math.inf
    delay_s: float = 0.0
    rate: float | None = None
    tried: tuple[Tried, ...] = field(default=(), compare=False)


def poisson(count: int, seed: int = 0) -> list[float]:
    """Times of arrivals that come once a second on average."""
    drawn = random.Random(seed)
    return list(itertools.accumulate(drawn.expovariate(1.0) for _ in range(count)))


class Arrivals:
    """Requests that come once a second on average; any other rate is a matter of units.

    times: of the arrivals. works: of each.
    """

    def __init__(self, times: Sequence[float], works: Sequence[float]) -> None:
        self.times, self.sums = times, [0.0, *itertools.accumulate(works)]

    def share_late(
        self,
        rate: float,
        plan: Plan,
        seconds: Callable[[float], float],
        target_s: float,
        noise: Sequence[float] = (1.0,),
    ) -> Search[float]:
        """Share that is not answered within the target when all are served in order, at `rate` a
        second. seconds: of a step, by its work; each is multiplied by the next of `noise`."""
        times, sums, count = self.times, self.sums, len(self.times)
        target, delay = target_s * rate, plan.delay_s * rate
        factors = itertools.cycle(noise)
        first, late, free, steps = 0, 0, 0.0, 0
        while first < count:
            steps += 1
            if steps % _PIECE == 0:
                yield
            full = min(first + plan.most, bisect_right(sums, sums[first] + plan.work) - 1)
            full = min(max(full, first + 1), count)
            begin = max(free, times[first])
            if delay and begin < times[first] + delay:
                begin = max(begin, min(times[first] + delay, times[full - 1]))
            end = min(full, bisect_right(times, begin))
            free = begin + rate * seconds(sums[end] - sums[first]) * next(factors)
            late += bisect_left(times, free - target, first, end) - first
            first = end
        return late / count


def held_rate(
    late: Callable[[float], Search[float]], low: float, most: float = 1e9
) -> Search[float]:
    """The highest rate up to `most` at which `late(rate)` stays below 1%, if it does at `low`;
    else 0."""
    yield
    if low > most or (yield from late(low)) > LATE:
        return 0.0
    high = min(2 * low, most)
    while (yield from late(high)) <= LATE:
        low, high = high, min(2 * high, most)
        if low == most:
            return most
        yield
    while high > low * _CLOSE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (yield from late(middle)) <= LATE else (low, middle)
        yield
    return low


def tune(
    curve: Curve,
    mix: Sequence[float],
    target_s: float,
    most: int,
    now: Plan | None = None,
    *,
    waiting: int = 256,
) -> Search[Plan]:
    """Looks for the plan that holds the highest rate, in pieces of about half a millisecond.

    mix: work of requests as they came of late. most: items of a step. now: the plan in force, which
    stays unless another one holds 2% more. waiting: requests that may wait while a step runs, and
    so may be in the next one. Where no plan holds the target, its rate is 0, and up to 8 usual
    requests run together as soon as they can.
    """
    mix = [work for work in mix if curve.seconds(work) <= target_s] or mix  # no plan helps others
    noise = list(curve.ratios) or [1.0]
    arrivals = Arrivals(poisson(_ARRIVALS), random.Random(1).choices(mix, k=_ARRIVALS))
    yield
    mean, together = sum(mix) / len(mix), max(1, waiting)

    def late(plan: Plan, rate: float) -> Search[float]:
        taken = replace(plan, most=min(plan.most, together))
        return arrivals.share_late(rate, taken, curve.seconds, target_s, noise)

    tried: list[Tried] = []

    def better(plan: Plan, best: Plan, worth: float) -> Search[Plan]:
        full = min(plan.work, min(plan.most, together) * mean)
        at_most = full / mean / curve.seconds(full)  # a short rehearsal does not see that it lags
        known = (best.rate or 0.0) * worth * _CLOSE
        one = Tried(max(1, round(full / mean)), plan.delay_s, None, best.rate or 0.0)
        if any(x.name == one.name for x in tried):
            return best
        low = known or _SLOW * at_most
        rate = yield from held_rate(lambda rate: late(plan, rate), low, at_most)
        tried.append(replace(one, rate=rate or None))
        return replace(plan, rate=rate) if rate else best

    best = Plan(most, _TOGETHER * mean, 0.0, 0.0)
    if now is not None:
        best = yield from better(replace(now, tried=()), best, 1.0)
    before = best if best.rate else None
    for plan in _steps(curve, mean, target_s, most, together):
        best = yield from better(plan, best, _WORTH if best is before else 1.0)
    for delay in _DELAYS:
        best = yield from better(replace(best, delay_s=delay * target_s), best, _WORTH)
    return replace(best, tried=tuple(tried))


def _steps(curve: Curve, mean: float, target_s: float, most: int, together: int) -> Iterable[Plan]:
    for count in _COUNTS:
        work = count * mean
        if count > min(most, together) or (count > 1 and curve.seconds(work) > target_s):
            return
        yield Plan(most, work * (1 + 1e-9))


def finished(search: Search[T]) -> T:
    """The outcome of a search that may take its time."""
    while True:
        try:
            next(search)
        except StopIteration as end:
            return cast(T, end.value)
