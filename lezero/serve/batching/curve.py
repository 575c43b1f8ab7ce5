"""How long a step takes, by the work in it: measured before the start, then learnt from each step.

Work is a number that the model gives each item so that the items of a step add up: rows, or tokens.
The curve is linear between knots. What is seen moves three things: a factor over all of it, so
that a machine that slows down is known after a few steps; the two knots beside the work; and where
the curve bends between knots, as where a kernel takes eight rows at a time, a new knot.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence

_DRIFT = 0.15
_LOCAL = 0.25
_LAST = 7
_NOISE = 0.08
_WILDEST = 4.0
_BEND = 0.15
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
        self._seconds = _rising(medians)
        self.scale = 1.0
        """Seconds now, over those of the beginning."""
        self.ratios: deque[float] = deque(maxlen=_RECENT)
        """Measured over expected seconds of late."""

    def seconds(self, work: float) -> float:
        """What a step of so much work is expected to take."""
        works, seconds = self._works, self._seconds
        if len(works) == 1:
            return self.scale * seconds[0] * max(1.0, work / works[0])
        if work < works[0]:
            return self.scale * self._below(work)
        at = min(max(bisect_left(works, work), 1), len(works) - 1)
        slope = (seconds[at] - seconds[at - 1]) / (works[at] - works[at - 1])
        if work > works[-1]:  # beyond what was measured no step gets cheaper
            slope = max(slope, seconds[-1] / works[-1] / 2)
            return self.scale * (seconds[-1] + slope * (work - works[-1]))
        return self.scale * (seconds[at - 1] + slope * (work - works[at - 1]))

    def _below(self, work: float) -> float:
        """Before the first knot: on with the line, but no dearer, nor less than in proportion."""
        (w, w2), (s, s2) = self._works[:2], self._seconds[:2]
        on = s + (s2 - s) / (w2 - w) * (work - w)
        return min(max(on, s * work / w), s)

    def spread(self) -> float:
        """How much longer than expected steps take, but for the slowest of them; at least 1."""
        return slowest(self.ratios)

    def learn(self, work: float, seconds: float) -> None:
        """Takes in that a step of so much work took so long."""
        ratio = min(max(seconds / self.seconds(work), 1 / _WILDEST), _WILDEST)
        self.ratios.append(ratio)
        last = sorted(list(self.ratios)[-_LAST:])
        middle = last[len(last) // 2]
        if abs(middle - 1) > _NOISE:  # else the whole would wander with the noise
            self.scale *= middle**_DRIFT
        if abs(ratio - 1) > _BEND:
            self._add_knot(work)
        self._move_knots(work, ratio)

    def _add_knot(self, work: float) -> None:
        """Adds a knot where there is none near, on the line as it was."""
        works = self._works
        at = bisect_right(works, work)
        near = any(abs(w - work) <= _APART * work for w in works[max(0, at - 1) : at + 1])
        if near or len(works) >= _MOST_KNOTS:
            return
        seconds = self.seconds(work) / self.scale
        insort(works, work)
        self._seconds.insert(works.index(work), seconds)

    def _move_knots(self, work: float, ratio: float) -> None:
        works = self._works
        right = bisect_left(works, work)
        if right == 0 or right == len(works):
            ends = [(min(right, len(works) - 1), 1.0)]
        else:
            share = (work - works[right - 1]) / (works[right] - works[right - 1])
            ends = [(right - 1, 1 - share), (right, share)]
        for at, weight in ends:
            self._seconds[at] *= float(ratio ** (_LOCAL * weight))
        self._seconds = _rising(self._seconds)


def slowest(ratios: Iterable[float], share: float = 0.95) -> float:
    """Of what was measured over what was expected: the most, but for the largest; at least 1."""
    found = sorted(ratios)
    return max(1.0, found[min(len(found) - 1, int(share * len(found)))]) if found else 1.0


def _rising(values: Sequence[float]) -> list[float]:
    """The values, where more work seems to take less time levelled out (pool adjacent violators:
    Ayer et al., 1955)."""
    levels: list[tuple[float, int]] = []
    for value in values:
        level, count = value, 1
        while levels and levels[-1][0] > level:
            before, size = levels.pop()
            level = (before * size + level * count) / (size + count)
            count += size
        levels.append((level, count))
    return [level for level, count in levels for _ in range(count)]
