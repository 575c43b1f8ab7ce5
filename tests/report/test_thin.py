import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lezero.report.thin import smooth, thin


def test_few_points_stay_as_they_are():
    assert thin([1, 2], [3, math.inf])[0] == [1, 2]
    assert math.isnan(thin([1, 2], [3, math.inf])[1][1])


@given(st.integers(1001, 20_000), st.integers(1, 1000), st.integers(1, 1000))
def test_spikes_gaps_and_ends_survive(n, spike, gap):
    spike, gap = spike * n // 1001, gap * n // 1001
    x, y = list(range(n)), [0.5 + i / n / 10 for i in range(n)]
    y[gap] = math.nan
    y[spike] = 9.0
    thin_x, thin_y = thin(x, y, 1000)
    assert len(thin_x) <= 1000
    assert thin_x == sorted(thin_x)
    assert (thin_x[0], thin_x[-1]) == (0, n - 1)
    assert max(v for v in thin_y if not math.isnan(v)) == 9.0
    assert any(math.isnan(v) for v in thin_y) == (spike != gap)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="x has 1 points, y has 2"):
        thin([1], [1, 2])


def test_smooth_has_no_lag_and_keeps_gaps():
    line = [float(i) for i in range(50)]
    assert smooth(line, 9) == pytest.approx(line)
    assert math.isnan(smooth([1, math.nan, 3], 9)[1])
    assert smooth([1, math.nan, 3, 3, 3], 3)[2] == 3
    assert smooth([], 5) == []
