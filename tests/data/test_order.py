"""The order is a bijection, well mixed, and the same forever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lezero.core.errors import ConfigError
from lezero.data import Order

seeds = st.integers(0, 2**63 - 1)


@settings(deadline=None, max_examples=60)
@given(seeds, st.integers(0, 10**6), st.integers(1, 700))
def test_each_epoch_visits_every_row_once(seed, epoch, length):
    order = Order(seed, length)
    assert sorted(order.index(epoch, i) for i in range(length)) == list(range(length))


@settings(deadline=None)
@given(seeds, st.integers(1, 10**12), st.data())
def test_pure_function_of_seed_epoch_and_index(seed, length, data):
    epoch, i = data.draw(st.integers(0, 1000)), data.draw(st.integers(0, length - 1))
    used = Order(seed, length)
    used.index(epoch + 1, 0)  # what was asked before does not matter
    assert used.index(epoch, i) == Order(seed, length).index(epoch, i)
    assert used.at(epoch * length + i) == used.index(epoch, i)


def test_well_mixed():
    length = 4096
    rows = np.array([[Order(seed, length).index(0, i) for i in range(length)] for seed in range(8)])
    places = np.arange(length)
    for row in rows:
        assert abs(np.corrcoef(places, row)[0, 1]) < 0.06  # 4 sigma of a random permutation: 0.0625
        assert abs(np.corrcoef(row[:-1], row[1:])[0, 1]) < 0.06
        assert (row == places).sum() < 10  # a random permutation has 1 fixed point on average
        counts = np.histogram2d(places, row, bins=8)[0]
        chi = ((counts - 64) ** 2 / 64).sum()
        assert chi < 100  # 49 degrees of freedom: mean 49, deviation 10
    assert all((rows[i] == rows[j]).mean() < 0.01 for i in range(8) for j in range(i))


def test_small_lengths_reach_every_permutation():
    seen = {tuple(Order(seed, 4).index(0, i) for i in range(4)) for seed in range(600)}
    assert len(seen) == 24


def test_epochs_differ():
    order = Order(0, 1000)
    first, second = ([order.index(e, i) for i in range(1000)] for e in (0, 1))
    assert np.mean(np.array(first) == np.array(second)) < 0.02


def test_never_changes():
    assert [Order(7, 10).index(0, i) for i in range(10)] == [6, 8, 0, 2, 3, 7, 1, 9, 5, 4]
    assert Order(1, 10**9).index(2, 3) == 988202125


def test_refuses_what_makes_no_sense():
    with pytest.raises(ConfigError, match="at least one row"):
        Order(0, 0)
    with pytest.raises(IndexError):
        Order(0, 3).index(0, 3)
