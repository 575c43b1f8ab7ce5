"""Fewer points with the same picture: spikes, ends and gaps survive."""

from __future__ import annotations

import math
from collections.abc import Sequence


def thin(
    x: Sequence[float], y: Sequence[float], limit: int = 1000
) -> tuple[list[float], list[float]]:
    """At most about `limit` of the points (x, y), in order.

    Every stretch of points keeps its smallest and its largest value, so that no spike is lost, and
    one NaN where it holds a value that is not finite, so that a gap stays a gap. The first and last
    points stay. Raises `ValueError` when the lengths differ.
    """
    if len(x) != len(y):
        raise ValueError(f"x has {len(x)} points, y has {len(y)}")
    n = len(x)
    if n <= limit:
        return [float(v) for v in x], [float(v) if math.isfinite(v) else math.nan for v in y]
    buckets = max(1, (limit - 2) // 3)
    keep = [0]
    for bucket in range(buckets):
        low = 1 + bucket * (n - 2) // buckets
        high = 1 + (bucket + 1) * (n - 2) // buckets
        keep += _extremes(y, low, high)
    keep.append(n - 1)
    return [float(x[i]) for i in keep], [
        float(y[i]) if math.isfinite(y[i]) else math.nan for i in keep
    ]


def _extremes(y: Sequence[float], low: int, high: int) -> list[int]:
    smallest = largest = gap = -1
    for i in range(low, high):
        if not math.isfinite(y[i]):
            gap = i
        elif smallest < 0:
            smallest = largest = i
        elif y[i] < y[smallest]:
            smallest = i
        elif y[i] > y[largest]:
            largest = i
    return sorted({smallest, largest, gap} - {-1})


def smooth(values: Sequence[float], span: int) -> list[float]:
    """The mean over `span` values around each one, fewer towards the ends; gaps stay gaps.

    The window is centred, so that a curve which falls steeply is not drawn late.
    """
    total, known = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        total.append(total[-1] + (value if finite else 0.0))
        known.append(known[-1] + finite)
    out = []
    for i, value in enumerate(values):
        reach = min(span // 2, i, len(values) - 1 - i)
        low, high = i - reach, i + reach + 1
        count = known[high] - known[low]
        out.append((total[high] - total[low]) / count if math.isfinite(value) else math.nan)
    return out
