import math

import pytest

from lezero.train.trend import Trend, sparkline


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, math.nan, 2], 3) == "▁ █"
    assert sparkline([5, 5], 9) == "▁▁"
    assert sparkline([5e-324, 0.0], 9) == sparkline([1e308, -1e308], 9) == "▁▁"
    assert sparkline([math.nan], 4) == " "
    assert sparkline([], 4) == sparkline([1], 0) == ""
    assert len(sparkline(list(range(1000)), 32)) == 32


@pytest.mark.parametrize("steps", [1, 63, 64, 65, 1000, 4096])
def test_a_trend_covers_the_whole_run_in_a_few_means(steps):
    trend = Trend()
    for step in range(steps):
        trend.add(float(step))
    assert 0 < len(trend.means) <= 64
    assert trend.means == sorted(trend.means)
    assert trend.means[0] <= steps / 16
    assert trend.means[-1] >= steps * 0.9 - 1


def test_a_stretch_without_a_finite_value_is_a_gap():
    trend = Trend()
    for value in (1.0, math.nan, 3.0):
        trend.add(value)
    assert sparkline(trend.means, 3) == "▁ █"
