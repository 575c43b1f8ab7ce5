"""A plan follows the machine and what is asked, in virtual time."""

from __future__ import annotations

import random

import pytest

from lezero.serve.batching.curve import Curve
from tests.serve.batching.test_batcher import batcher, linear
from tests.serve.batching.virtual import TARGET, drive, measured, stream


def test_a_machine_that_slows_down_in_mid_run() -> None:
    made = batcher()
    slow = lambda work, now: linear(work, now) * (1 if now < 5 else 3)  # noqa: E731
    told = drive(made, stream(90, 2500), slow)
    before, after = told.latencies[:300], told.latencies[-1500:]
    assert sum(x > TARGET for x in before) <= 3
    assert sum(x > TARGET for x in after) <= 15
    assert len(told.latencies) >= 2400
    assert made.plans > 1, "it looked for a plan again"
    assert made.curve.seconds(2) == pytest.approx(3 * linear(2, 0), rel=0.25)


@pytest.mark.parametrize(("times", "lasts", "seed"), [(8, 1, 0), (8, 2, 2), (10, 2, 2), (12, 2, 0)])
def test_a_short_slowdown_leaves_the_plan(times: int, lasts: int, seed: int) -> None:
    drawn = random.Random(seed)
    usual = lambda work: 0.004 + 0.0005 * work  # noqa: E731

    def seconds(work: float, now: float) -> float:
        slow = times if 4 <= now < 4 + lasts else 1
        return usual(work) * slow * (1 + 0.3 * drawn.random())

    made = batcher(curve=measured(lambda work, now: usual(work)))
    told = drive(made, stream(900, 12_000, seed=seed + 7), seconds)
    assert made.plan.work > 40, "before it was 48; 20 to 32 remained"
    assert made.plan.rate > 1000
    assert sum(x > 5 + lasts for x in told.refused) < 1500  # up to 5,000 before, until the end


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_the_plan_of_a_slower_machine_knows_how_steps_vary(seed: int) -> None:
    """Some 290 requests a second can be answered in time then; without outliers 588 could."""
    drawn = random.Random(seed)
    usual = lambda work: 0.004 + 0.0005 * work  # noqa: E731

    def seconds(work: float, now: float) -> float:
        slow, outlier = 2 if now >= 4 else 1, 2 if drawn.random() < 0.07 else 1
        return usual(work) * slow * outlier

    made = batcher(curve=measured(lambda work, now: usual(work)))
    drive(made, stream(500, 8000, seed=seed + 7), seconds)
    assert made.plans == 2
    assert made.plan.rate < 500


def test_a_machine_that_speeds_up_is_used() -> None:
    made = batcher(curve=measured(lambda work, now: 3 * linear(work, now)))
    told = drive(made, stream(330, 4000), linear)
    assert not [x for x in told.refused if x > 6]
    assert made.plan.rate > 300


def test_requests_that_grow_longer_change_the_plan() -> None:
    made = batcher()
    works = [1.0] * 500 + [6.0] * 1500
    told = drive(made, stream(55, 2000, works), linear)
    assert made.plans > 1
    assert sum(x > TARGET for x in told.latencies) <= 30


def test_a_wrong_curve_at_the_start_is_unlearnt() -> None:
    made = batcher(curve=Curve([(1, 0.0001), (8, 0.0002), (64, 0.001)]))
    told = drive(made, stream(300, 3000), linear)
    late = [x > TARGET for x in told.latencies]
    assert sum(late[-2000:]) <= 20


def test_a_start_that_was_disturbed_does_not_stay() -> None:
    """Steps of two and more seemed ten times as slow while others used the machine."""
    wrong = Curve([(1.0, linear(1.0, 0)), (2.0, 10 * linear(2.0, 0)), (3.0, 10 * linear(3.0, 0))])
    made = batcher(curve=wrong)
    assert made.plan.work < 2
    drive(made, stream(700, 24_000), linear)
    assert made.plan.work > 4
    told = drive(made, stream(380, 3000), linear)
    assert told.in_time / (told.in_time + len(told.refused)) > 0.95
