"""Axes: which range to show, where the ticks go and what they say."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lezero.report.units import number


@dataclass(frozen=True)
class Axis:
    """A range of values mapped to 0…1; `ticks` are the values that carry a label."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Where `value` lies, 0 at `low` and 1 at `high`; NaN where it cannot be shown."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return math.nan
        if self.log:
            span = math.log(self.high) - math.log(self.low)
            return (math.log(value) - math.log(self.low)) / span
        return (value - self.low) / (self.high - self.low)


def linear(
    values: Iterable[float],
    *,
    ticks: int = 5,
    zero: bool = False,
    tight: bool = False,
    whole: bool = False,
) -> Axis:
    """An axis over the finite `values`, with round ticks.

    zero: 0 is always shown. tight: ends at the data instead of at a tick. whole: integers only.
    """
    low, high = _ends(values, zero)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-290):  # flat, as far as one can see
        pad = abs(low) * 0.05 if abs(low) > 1e-280 else 1.0
        low, high = (low, high + pad) if tight or (zero and low == 0) else (low - pad, high + pad)
    step = _step((high - low) / max(1, ticks))
    if whole:
        step = max(1.0, math.ceil(step))
    if not tight:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    at = tuple(i * step for i in range(first, last + 1))
    return Axis(low, high, at, tuple(_label(value, step) for value in at))


def logarithmic(values: Iterable[float]) -> Axis:
    """A logarithmic axis over the positive finite `values`; ticks at powers of 10, or 1, 2, 5."""
    low, high = _ends((v for v in values if v > 0), False)
    if low <= 0:
        low, high = 0.1, 10.0
    if high / low < 1.2:
        low, high = low / 1.5, high * 1.5
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 6)
    factors = (1,) if last - first > 2 else (1, 2, 5)
    low, high = low / 1.08, high * 1.08
    at = [f * 10.0**e for e in range(first, last + 1, every) for f in factors]
    at = [value for value in at if low <= value <= high]
    return Axis(low, high, tuple(at), tuple(number(value, 2) for value in at), log=True)


def _ends(values: Iterable[float], zero: bool) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    if zero or not finite:
        finite.append(0.0)
    return min(finite), max(finite)


def _step(raw: float) -> float:
    """The round step (1, 2, 2.5 or 5 times a power of ten) next above `raw`."""
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 1e-300 else 1e-300
    return next((f * power for f in (1, 2, 2.5, 5) if f * power >= raw * 0.999), 10 * power)


def _label(value: float, step: float) -> str:
    if abs(value) < step * 1e-6:
        return "0"
    if step < 1e-3 or abs(value) >= 1e7:
        return number(value, 3)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6:
        decimals += 1
    return f"{value:,.{decimals}f}"
