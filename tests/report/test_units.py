import math

import pytest

from lezero.report import units


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (2.03125, "2.031"), (1234, "1,234"), (3e-4, "3e-4"), (0.25, "0.2500"),
     (math.nan, "n/a"), (None, "n/a"), (-math.inf, "-∞"), (1e20, "1e20")],
)  # fmt: skip
def test_number(value, said):
    assert units.number(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (1.5 * 2**30, "1.50 GiB"),
     (820 * 2**20, "820 MiB"), (2**70, "1048576 PiB"), (math.nan, "n/a")],
)  # fmt: skip
def test_size(value, said):
    assert units.size(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(2e-6, "2 µs"), (0.0712, "71.2 ms"), (0.731, "0.73 s"), (59.9, "59.9 s"), (59.99, "1m 00s"),
     (372, "6m 12s"), (3600 * 2 + 180, "2h 03m"), (86400 * 3 + 4 * 3600, "3d 04h"), (-2, "-2.00 s"),
     (None, "n/a"), (math.inf, "∞")],
)  # fmt: skip
def test_span(value, said):
    assert units.span(value) == said


def test_the_rest():
    assert units.count(12345.4) == "12,345"
    assert units.count(26.1e6) == "26.1 M"
    assert units.rate(2.02e12, "FLOP/s") == "2.02 TFLOP/s"
    assert units.percent(0.412) == "41%"
    assert units.percent(0.0531) == "5.3%"
    assert units.scale("bytes", 1.5 * 2**30) == (2.0**30, "GiB")
    assert units.scale("seconds", 0.02) == (1e-3, "ms")
    assert units.scale("", math.nan) == (1.0, "")
