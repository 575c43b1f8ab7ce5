import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lezero.report.scale import linear, logarithmic

VALUES = st.lists(st.floats(-1e12, 1e12, allow_nan=False), min_size=1, max_size=20)


@given(VALUES)
def test_linear_covers_the_values_with_a_few_distinct_ticks(values):
    axis = linear(values)
    assert axis.low < axis.high
    assert 2 <= len(axis.ticks) <= 12
    assert list(axis.ticks) == sorted(axis.ticks)
    for value in values:
        assert -1e-6 <= axis.place(value) <= 1 + 1e-6


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=20))
def test_logarithmic_covers_the_values(values):
    axis = logarithmic(values)
    for value in values:
        assert 0 <= axis.place(value) <= 1
    assert len(axis.ticks) <= 12


def test_labels_and_ends():
    axis = linear([0, 0.00021, 3e-4], zero=True)
    assert axis.labels[0] == "0"
    assert axis.labels[-1] == "3e-4"
    assert linear([1, 1000], tight=True, whole=True).labels == ("200", "400", "600", "800", "1,000")
    assert all(tick == int(tick) for tick in linear([1, 3], tight=True, whole=True).ticks)


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf], [5.0], [0.0]])
def test_odd_values_still_give_an_axis(values):
    axis = linear(values)
    assert axis.low < axis.high
    assert logarithmic(values).low < logarithmic(values).high


def test_what_cannot_be_placed_is_nan():
    assert math.isnan(linear([0, 1]).place(math.nan))
    assert math.isnan(logarithmic([1, 10]).place(-1))
