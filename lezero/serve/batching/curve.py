"""How long a step takes, by the work in it: measured before the start, then learnt from each step.

Work is a number that the model gives each item so that the items of a step add up: rows, or tokens.
The curve is linear between knots. What is seen moves three things: a factor over all of it, so
that a machine that slows down is known after a few steps; the knot next to the work; and where the
curve bends between knots, as where a kernel takes eight rows at a time, a new knot.

[Note: quartiles] Both factors stay as they are while they lie between the quartiles of what was
seen of late, and else go to the nearer one: the factor over all between those of what the last
steps took over the base, and a knot's own of the same over that factor, of steps next to it. So
slow steps, which every machine has, move nothing; how much slower they are is in `ratios`. Neither
factor is added to what it was: two sums of which one follows the median and one the mean drift
apart for ever, and what no step visits goes with one of them. The base itself, at first what was
measured at the start, takes a knot's factor in where that is large: the start was disturbed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence

_LATELY, _NEAR = 7, 9
"""Steps whose quartiles count. The factor over all must be the quicker one: it is tried first."""
_BEFORE = 3
"""Steps that what was known of a knot before counts as."""
_LARGE, _MOST_WEIGHT = 1.2, 30
_WILDEST = 8.0
_BEND = 0.15
_JUMP = 1.15
_APART = 0.04
_MOST_KNOTS = 96
_RECENT = 64


class Curve:
    """Seconds of a step by its work.

    measured: (work, seconds) pairs of steps that ran alone, at least one.
    """

    def __init__(self, measured: Sequence[tuple[float, float]]) -> None:
        assert measured, "a curve needs one measured step at least"
        by_work: dict[float, list[float]] = {}
        for work, seconds in measured:
            by_work.setdefault(float(work), []).append(max(seconds, 1e-9))
        self._works = sorted(by_work)
        medians = [sorted(by_work[w])[len(by_work[w]) // 2] for w in self._works]
        self._base = _rising(medians, [1.0] * len(medians))
        self._factors = [1.0] * len(self._works)
        self._near = [_near(1.0) for _ in self._works]
        """Of each knot: seconds of steps next to it, over those of the base and the scale."""
        self._weights = [1.0] * len(self._works)
        """Of each knot: how many steps next to it are known, to a limit."""
        self._seconds = list(self._base)
        self._lately: deque[tuple[float, float]] = deque(maxlen=_LATELY)
        """(work, seconds) of the last steps."""
        self.scale = 1.0
        """Seconds now, over those of the base."""
        self.ratios: deque[float] = deque(maxlen=_RECENT)
        """Measured over expected seconds of late."""

    def seconds(self, work: float) -> float:
        """What a step of so much work is expected to take."""
        return self.scale * self._on(self._seconds, work)

    def _on(self, seconds: Sequence[float], work: float) -> float:
        """On the line through these seconds at the knots."""
        works = self._works
        if len(works) == 1:
            return seconds[0] * max(1.0, work / works[0])
        if work < works[0]:
            return self._below(seconds, work)
        at = min(max(bisect_left(works, work), 1), len(works) - 1)
        slope = (seconds[at] - seconds[at - 1]) / (works[at] - works[at - 1])
        if work > works[-1]:  # beyond what was measured no step gets cheaper
            slope = max(slope, seconds[-1] / works[-1] / 2)
            return seconds[-1] + slope * (work - works[-1])
        return seconds[at - 1] + slope * (work - works[at - 1])

    def _below(self, seconds: Sequence[float], work: float) -> float:
        """Before the first knot: on with the line, but no dearer, nor less than in proportion."""
        (w, w2), (s, s2) = self._works[:2], seconds[:2]
        on = s + (s2 - s) / (w2 - w) * (work - w)
        return min(max(on, s * work / w), s)

    def spread(self) -> float:
        """How much longer than expected steps take, but for the slowest of them; at least 1."""
        return slowest(self.ratios)

    def learn(self, work: float, seconds: float) -> None:
        """Takes in that a step of so much work took so long."""
        seconds = max(seconds, 1e-9)
        ratio = seconds / self.seconds(work)
        self.ratios.append(min(max(ratio, 1 / _WILDEST), _WILDEST))
        if abs(ratio - 1) > _BEND:
            self._add_knot(work)
        self._lately.append((work, seconds))
        self._take_scale()
        at = self._next_to(work)
        near = self._near[at]
        near.append(seconds / self._on(self._base, work) / self.scale)
        self._weights[at] = min(self._weights[at] + 1, _MOST_WEIGHT)
        factor = self._factors[at] = _between(self._factors[at], near)
        if len(near) == _NEAR and not 1 / _LARGE < factor < _LARGE:
            self._base[at] *= factor
            self._factors[at], self._near[at] = 1.0, _near(1.0)
            self._take_scale()
        found = [s * f for s, f in zip(self._base, self._factors, strict=True)]
        self._seconds = _rising(found, self._weights)

    def _take_scale(self) -> None:
        over = [seconds / self._on(self._base, work) for work, seconds in self._lately]
        if len(over) == _LATELY:
            before, self.scale = self.scale, _between(self.scale, over)
            if not 1 / _JUMP < self.scale / before < _JUMP:
                self.ratios.clear()  # they tell of the jump, and not of how steps vary

    def _add_knot(self, work: float) -> None:
        """Adds a knot where there is none near, on the line as it was."""
        works = self._works
        at = bisect_right(works, work)
        near = any(abs(w - work) <= _APART * work for w in works[max(0, at - 1) : at + 1])
        if near or len(works) >= _MOST_KNOTS:
            return
        base, seconds = self._on(self._base, work), self._on(self._seconds, work)
        insort(works, work)
        self._base.insert(at, base)
        self._factors.insert(at, seconds / base)
        self._near.insert(at, _near(seconds / base))
        self._weights.insert(at, 1.0)

    def _next_to(self, work: float) -> int:
        """The knot that is nearest."""
        right = min(bisect_left(self._works, work), len(self._works) - 1)
        left = max(right - 1, 0)
        return min(left, right, key=lambda at: abs(self._works[at] - work))


def _near(before: float) -> deque[float]:
    return deque([before] * _BEFORE, maxlen=_NEAR)


def _between(value: float, seen: Iterable[float]) -> float:
    """The value, or the quartile of what was seen that is nearest to it."""
    found = sorted(seen)
    few = len(found) // 4
    return min(max(value, found[few]), found[-1 - few])


def slowest(ratios: Iterable[float], share: float = 0.95) -> float:
    """Of what was measured over what was expected: the most, but for the largest; at least 1."""
    found = sorted(ratios)
    return max(1.0, found[min(len(found) - 1, int(share * len(found)))]) if found else 1.0


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The values, where more work seems to take less time levelled out (pool adjacent violators:
    Ayer et al., 1955)."""
    levels: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        level, count = value, 1
        while levels and levels[-1][0] > level:
            before, other, size = levels.pop()
            level = (before * other + level * weight) / (other + weight)
            weight += other
            count += size
        levels.append((level, weight, count))
    return [level for level, _, count in levels for _ in range(count)]
