"""A batcher in virtual time: arrivals of a list, a model that is a function of its work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lezero.serve.batching.batcher import Ask, Batch, Batcher, FullError
from lezero.serve.batching.curve import Curve
from lezero.serve.batching.model import COUNTS
from lezero.serve.batching.plan import LATE, Arrivals, Plan, Search, finished, held_rate, poisson

Seconds = Callable[[float, float], float]
"""(work, now) → seconds of a step."""
TARGET = 0.05


@dataclass
class Told:
    """What became of the requests. latencies: of those that were answered."""

    latencies: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    """When requests were refused."""
    batches: list[Batch] = field(default_factory=list)
    ended: float = 0.0

    @property
    def in_time(self) -> int:
        return sum(x <= TARGET for x in self.latencies)

    def quantile(self, share: float) -> float:
        return sorted(self.latencies)[int(share * len(self.latencies))]


def drive(batcher: Batcher, asks: Sequence[tuple[float, Ask]], seconds: Seconds) -> Told:
    """Serves all requests; each comes at its time."""
    told, now, at = Told(), 0.0, 0
    running: Batch | None = None
    ends = took = 0.0
    left: dict[Ask, int] = {}
    while at < len(asks) or running or batcher.waiting:
        wake = math.inf
        if running is None:
            found = batcher.next(now)
            if isinstance(found, Batch):
                running, took = found, seconds(found.work, now)
                ends = now + took
                told.batches.append(found)
            elif found is not None:
                wake = found
        ends_now = ends if running else math.inf
        now = max(now, min(asks[at][0] if at < len(asks) else math.inf, ends_now, wake))
        while at < len(asks) and asks[at][0] <= now:
            try:
                batcher.add(asks[at][1], now)
                left[asks[at][1]] = len(asks[at][1].works)
            except FullError:
                told.refused.append(now)
            at += 1
        if running is not None and ends <= now:
            batcher.done(running, took)
            batcher.search()
            for ask, _ in running.items:
                left[ask] -= 1
                if left[ask] == 0:
                    told.latencies.append(now - ask.arrived_s)
            running = None
    told.ended = now
    return told


def measured(seconds: Seconds) -> Curve:
    """What a warm-up measures: steps alone, up to the target."""
    found = [(w, sorted(seconds(w, 0.0) for _ in range(3))[1]) for w in COUNTS]
    return Curve([x for x in found if x[1] <= 2 * TARGET] or found[:1])


def stream(rate: float, count: int, works: Sequence[float] = (1.0,), seed: int = 7) -> list:
    """Requests of one item that come at `rate` a second on average."""
    times = poisson(count, seed)
    return [(x / rate, Ask([works[i % len(works)]])) for i, x in enumerate(times)]


def best_fixed(seconds: Seconds, count: int, works: Sequence[float] = (1.0,)) -> tuple[float, Plan]:
    """The highest rate that a fixed batch and delay hold, and which; found by a sweep."""
    arrivals = Arrivals(poisson(count, 7), [works[i % len(works)] for i in range(count)])
    best, which = 0.0, Plan(1)
    for most in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256):
        for delay_s in (0.0, 0.002, 0.005, 0.01, 0.02, 0.03):
            plan = Plan(most, delay_s=delay_s)

            def late(rate: float, plan: Plan = plan) -> Search[float]:
                return arrivals.share_late(rate, plan, lambda w: seconds(w, 0.0), TARGET)

            rate = finished(held_rate(late, best * 1.005 or 5.0))
            if rate:
                best, which = rate, plan
    return best, which


def late_when_tuned(
    seconds: Seconds, rate: float, count: int, works: Sequence[float] = (1.0,)
) -> float:
    """The share that a batcher that tunes itself refuses or answers too late."""
    batcher = Batcher(measured(seconds), target_s=TARGET, waiting=1000)
    return 1 - drive(batcher, stream(rate, count, works), seconds).in_time / count


__all__ = ["LATE", "TARGET", "Told", "best_fixed", "drive", "late_when_tuned", "measured", "stream"]
