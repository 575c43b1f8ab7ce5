"""Figures as people read them: bytes, seconds, counts, rates, with few digits and a unit."""

from __future__ import annotations

import math

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P")


def number(value: float | None, digits: int = 4) -> str:
    """A plain number with `digits` significant digits: `1,234`, `2.031`, `3e-4`."""
    if value is None or math.isnan(value):
        return "n/a"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size < -3 or size > 14:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{_trim(mantissa)}e{int(exponent)}"
    decimals = max(0, digits - 1 - size)
    text = f"{value:,.{decimals}f}"
    return _trim(text) if float(value).is_integer() else text


def count(value: float | None) -> str:
    """A number of things: `812`, `12,345`, `26.1 M`."""
    if value is None or not math.isfinite(value):
        return number(value)
    if abs(value) < 1e6:
        return f"{value:,.0f}"
    divisor, prefix = scale("count", value)
    return f"{value / divisor:.3g} {prefix}"


def size(value: float | None) -> str:
    """Bytes: `1.42 GiB`."""
    if value is None or not math.isfinite(value):
        return number(value)
    divisor, unit = scale("bytes", value)
    scaled = value / divisor
    return f"{scaled:.0f} {unit}" if unit == "B" else f"{scaled:.{_decimals(scaled)}f} {unit}"


def rate(value: float | None, unit: str) -> str:
    """A decimal rate: `2.02 TFLOP/s`, `26.0 GB/s`."""
    if value is None or not math.isfinite(value):
        return number(value)
    divisor, prefix = scale("count", value)
    scaled = value / divisor
    return f"{scaled:.{_decimals(scaled)}f} {prefix}{unit}"


def span(value: float | None) -> str:
    """Seconds: `850 µs`, `71.2 ms`, `0.73 s`, `6m 12s`, `2h 03m`, `3d 04h`."""
    if value is None or not math.isfinite(value):
        return number(value)
    if value < 0:
        return f"-{span(-value)}"
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 0.1:
        return f"{value * 1e3:.3g} ms"
    if value < 59.95:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {seconds:02d}s"


def percent(value: float | None) -> str:
    """A fraction as a percentage: 0.412 is `41%`, 0.0531 is `5.3%`."""
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{value:.1%}" if abs(value) < 0.0995 else f"{value:.0%}"


def within(error: float) -> str:
    """An error as people read it: beyond 1 only one side of it says something."""
    return f"±{error:.0%}" if error < 1 else f"at most {1 + error:.1f} times as much"


def scale(kind: str, largest: float) -> tuple[float, str]:
    """What to divide by, and the unit then, so that `largest` is shown with few digits.

    kind: "bytes", "count" (decimal prefixes), "percent", "seconds", or "" for no change.
    """
    largest = abs(largest) if math.isfinite(largest) else 0.0
    if kind in ("bytes", "count"):
        base, names = (1024.0, _BINARY) if kind == "bytes" else (1000.0, _DECIMAL)
        power = 0
        while largest >= base * 0.9995 and power < len(names) - 1:
            largest, power = largest / base, power + 1
        return base**power, names[power]
    if kind == "percent":
        return 0.01, "%"
    if kind == "seconds":
        return (1e-3, "ms") if largest < 0.1 else (1.0, "s")
    return 1.0, ""


def _decimals(scaled: float) -> int:
    return 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0


def _trim(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
