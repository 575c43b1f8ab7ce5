"""The curve of a step's seconds, learnt from what is seen."""

from __future__ import annotations

import math
import random

import pytest

from lezero.serve.batching.curve import Curve


def test_it_is_linear_between_what_was_measured() -> None:
    curve = Curve([(2, 0.01), (4, 0.02), (4, 0.9), (4, 0.02)])
    assert curve.seconds(2) == 0.01
    assert curve.seconds(3) == pytest.approx(0.015)
    assert curve.seconds(4) == 0.02, "the median of several"
    assert curve.seconds(8) == pytest.approx(0.04)
    assert 0 < curve.seconds(0.5) <= 0.01


def test_more_work_never_seems_to_take_less_time() -> None:
    curve = Curve([(1, 0.02), (2, 0.01), (4, 0.03), (8, 0.025)])
    drawn = random.Random(0)
    for _ in range(300):
        curve.learn(drawn.uniform(0.2, 20), drawn.uniform(0.001, 0.1))
    seconds = [curve.seconds(0.1 * i) for i in range(1, 400)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_one_measured_step_is_enough_to_begin() -> None:
    curve = Curve([(4, 0.02)])
    assert curve.seconds(1) == curve.seconds(4) == 0.02
    assert curve.seconds(8) == pytest.approx(0.04)
    for _ in range(10):
        curve.learn(8, 0.03)
    assert curve.seconds(8) == pytest.approx(0.03, rel=0.05)


def test_a_machine_that_slows_down_is_known_everywhere() -> None:
    curve = Curve([(n, 0.01 + 0.001 * n) for n in (1, 2, 4, 8, 16, 32)])
    for _ in range(25):
        curve.learn(4, 2 * 0.014)
    assert curve.seconds(4) == pytest.approx(0.028, rel=0.1)
    assert curve.seconds(32) == pytest.approx(0.084, rel=0.25)


def test_steps_between_knots_are_found() -> None:
    true = lambda n: 0.002 + 0.006 * math.ceil(n / 8)  # noqa: E731
    curve = Curve([(n, true(n)) for n in (1, 4, 8, 16, 32)])
    for _ in range(60):
        for n in (8, 9, 12, 16):
            curve.learn(n, true(n))
    assert curve.seconds(8) == pytest.approx(true(8), rel=0.1)
    assert curve.seconds(9) == pytest.approx(true(9), rel=0.1)


def test_one_step_that_stalls_does_not_count_for_much() -> None:
    curve = Curve([(1, 0.01), (8, 0.02)])
    for _ in range(40):
        curve.learn(8, 0.02)
    curve.learn(8, 5.0)
    assert curve.seconds(8) < 0.04
    assert curve.spread() == pytest.approx(1.0), "the slowest few are left out"
    for _ in range(40):
        curve.learn(8, 0.02)
    assert curve.seconds(8) == pytest.approx(0.02, rel=0.1)


def test_noise_does_not_make_it_wander() -> None:
    drawn = random.Random(2)
    curve = Curve([(n, 0.01 + 0.001 * n) for n in (1, 2, 4, 8, 16, 32)])
    for _ in range(2000):
        n = drawn.choice((1, 2, 3, 5, 8))
        curve.learn(n, (0.01 + 0.001 * n) * drawn.lognormvariate(0, 0.1))
    for n in (1, 3, 8):
        assert curve.seconds(n) == pytest.approx(0.01 + 0.001 * n, rel=0.2)
    assert curve.spread() < 1.5


@pytest.mark.parametrize("slow", [(0.05, 3.0), (0.1, 2.0), (0.2, 4.0)], ids=str)
def test_slow_steps_move_nothing_however_many_there_are(slow: tuple[float, float]) -> None:
    """What no step visits stays where it was, and so does what they visit."""
    drawn = random.Random(3)
    true = lambda n: 0.004 + 0.001 * n  # noqa: E731
    curve = Curve([(n, true(n)) for n in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 48)])
    for _ in range(10_000):
        n = drawn.randint(1, 8)
        longer = slow[1] if drawn.random() < slow[0] else 1.0
        curve.learn(n, true(n) * longer * drawn.lognormvariate(0, 0.03))
    for n in (1, 3, 8, 16, 32, 48):
        assert curve.seconds(n) == pytest.approx(true(n), rel=0.15)


def test_what_was_wrong_at_the_start_does_not_come_back() -> None:
    true = lambda n: 0.001 + 0.002 * n  # noqa: E731
    curve = Curve([(1, true(1)), (2, 10 * true(2)), (3, 10 * true(3))])
    for turn in range(2000):
        curve.learn(1, true(1))
        if turn % 100 == 0:
            curve.learn(2, true(2))
    assert curve.seconds(2) == pytest.approx(true(2), rel=0.1)
    for _ in range(2000):
        curve.learn(2, true(2))
    assert curve.seconds(1) == pytest.approx(true(1), rel=0.1)
