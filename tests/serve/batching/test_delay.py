"""What a delay, and the room for those that wait, make of forecasts."""

from __future__ import annotations

import pytest

from lezero.serve.batching.batcher import Ask, Batch, Batcher
from lezero.serve.batching.curve import Curve
from lezero.serve.batching.plan import Plan
from tests.serve.batching.virtual import TARGET, drive, stream

FLAT = Curve([(1.0, 0.01), (256.0, 0.01)])


def test_of_a_delay_what_is_left_counts_and_nothing_once_the_step_is_full() -> None:
    made = Batcher(FLAT, target_s=0.1, plan=Plan(3, delay_s=0.04))
    asks = [Ask([1.0]) for _ in range(5)]
    for ask, now in zip(asks, (1.0, 1.03, 1.035, 1.036, 1.036), strict=True):
        made.add(ask, now)
    assert [ask.foretold_s for ask in asks] == pytest.approx([0.05, 0.02, 0.01, 0.05, 0.05])
    assert isinstance(made.next(1.036), Batch)
    last = Ask([1.0], "another kind")
    made.add(last, 1.04)
    assert last.foretold_s == pytest.approx(0.056), "it waits while others run"


def test_a_running_step_is_part_of_the_delay() -> None:
    made = Batcher(FLAT, target_s=0.1, plan=Plan(3, delay_s=0.008))
    made.add(Ask([1.0]), 1.0)
    step = made.next(1.008)
    assert isinstance(step, Batch)
    ask = Ask([1.0])
    made.add(ask, 1.008)
    assert ask.foretold_s == pytest.approx(0.02)


@pytest.mark.parametrize("delay_s", [0.03, 0.039])
def test_a_delay_near_the_target_refuses_nobody_who_is_in_time(delay_s: float) -> None:
    seconds = lambda work, now: 0.01  # noqa: E731
    made = Batcher(FLAT, target_s=TARGET, plan=Plan(8, delay_s=delay_s))
    told = drive(made, stream(150, 1500), seconds)
    assert len(told.refused) <= 15
    assert told.in_time >= 1480
    assert len(told.batches) < 500, "they share steps"


def test_a_plan_goes_by_those_that_may_wait() -> None:
    for waiting, most in ((0, 1), (2, 2)):
        plan = Batcher(FLAT, target_s=TARGET, waiting=waiting).plan
        assert plan.rate is not None
        assert 0 < plan.rate <= most / 0.01
        assert plan.most == 256, "items: a request of many fills a step by itself"
