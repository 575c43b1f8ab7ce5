"""The course of a whole run in one line of small bars."""

from __future__ import annotations

import math

_SPARKS = "▁▂▃▄▅▆▇█"


class Trend:
    """A whole run in at most 64 means of equal stretches; each doubles when there is no room."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self._each, self._sum, self._count, self._seen = 1, 0.0, 0, 0

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self._sum, self._count = self._sum + value, self._count + 1
        self._seen += 1
        if self._seen < self._each:
            return
        self.means.append(self._sum / self._count if self._count else math.nan)
        self._sum, self._count, self._seen = 0.0, 0, 0
        if len(self.means) == 64:
            pairs = zip(self.means[::2], self.means[1::2], strict=True)
            self.means = [_mean([a, b]) for a, b in pairs]
            self._each *= 2


def sparkline(values: list[float], cells: int) -> str:
    """The values as `cells` small bars, each the mean of a stretch; gaps are spaces."""
    if cells <= 0 or not values:
        return ""
    n, cells = len(values), min(cells, len(values))
    means = (
        values
        if n == cells
        else [_mean(values[i * n // cells : (i + 1) * n // cells]) for i in range(cells)]
    )
    shown = [v for v in means if math.isfinite(v)]
    if not shown:
        return " " * cells
    low, high = min(shown), max(shown)
    width = high - low
    if not 1e-290 < width < math.inf:  # flat, or wider than a float
        return "".join(_SPARKS[0] if math.isfinite(v) else " " for v in means)
    top = len(_SPARKS) - 1
    return "".join(
        _SPARKS[round((v - low) / width * top)] if math.isfinite(v) else " " for v in means
    )


def _mean(values: list[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan
