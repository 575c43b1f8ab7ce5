"""Plans, rehearsed in virtual time, beside the best fixed batch and delay of a sweep."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from lezero.serve.batching.curve import Curve
from lezero.serve.batching.plan import Arrivals, Plan, finished, poisson, tune
from tests.serve.batching.virtual import LATE, TARGET, best_fixed, late_when_tuned, measured

MODELS = {
    "linear": lambda work, now: 0.001 + 0.002 * work,
    "costly to begin": lambda work, now: 0.008 + 0.0003 * work,
    "no gain": lambda work, now: 0.004 * work,
    "steps of 8": lambda work, now: 0.002 + 0.006 * math.ceil(work / 8),
    "only full steps pay": lambda work, now: 0.010 * math.ceil(work / 8),
    "steps of 32": lambda work, now: 0.015 * math.ceil(work / 32),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_holds_the_rate_of_the_best_fixed_batch_and_delay(name: str) -> None:
    fixed, which = best_fixed(MODELS[name], 2000)
    late = late_when_tuned(MODELS[name], 0.95 * fixed, 2000)
    assert late <= LATE, f"{late:.1%} late at 95% of {fixed:.0f}/s, which {which} holds"


def test_it_does_so_with_noise_and_requests_of_many_sizes() -> None:
    drawn = random.Random(5)
    works = (0.5, 0.6, 0.8, 1.0, 1.0, 1.3, 2.0, 3.0)
    exact = lambda work, now: 0.002 + 0.002 * work  # noqa: E731
    noisy = lambda work, now: exact(work, now) * drawn.uniform(0.95, 1.08)  # noqa: E731
    fixed, which = best_fixed(noisy, 2000, works)
    late = late_when_tuned(noisy, 0.95 * fixed, 2000, works)
    assert late <= LATE, f"{late:.1%} late at 95% of {fixed:.0f}/s, which {which} holds"


def test_steps_that_were_slow_of_late_lower_what_a_plan_holds() -> None:
    plain, noisy = measured(MODELS["linear"]), measured(MODELS["linear"])
    plain.ratios.clear()
    noisy.ratios.extend([1.0, 1.0, 1.0, 1.5] * 10)
    rates = [finished(tune(curve, [1.0], TARGET, 1)).rate for curve in (plain, noisy)]
    assert rates[1] < 0.95 * rates[0]


def test_a_rehearsal_is_what_happens() -> None:
    arrivals = Arrivals([1.0, 1.5, 2.0, 10.0], [1, 1, 1, 1])
    late = lambda *given, **noise: finished(arrivals.share_late(*given, **noise))  # noqa: E731
    one = lambda work: 1.0  # noqa: E731
    assert late(1.0, Plan(1), one, 1.0) == 0.5, "at 2, 3, 4 and 11"
    assert late(1.0, Plan(4), one, 1.5) == 0.0, "one alone, then two, then one"
    assert late(1.0, Plan(4), one, 1.4) == 0.25
    assert late(1.0, Plan(3, delay_s=1.0), one, 2.0) == 0.0, "three at 2, when they are full"
    assert late(1.0, Plan(4, delay_s=1.0), one, 1.9) == 0.25, "the first waited for the third"
    assert late(1.0, Plan(4, work=1.0), one, 1.0) == 0.5
    assert late(1.0, Plan(1), one, 1.0, noise=[0.1]) == 0.0
    assert late(10.0, Plan(1), lambda work: 0.1, 0.1) == 0.5, "ten times as fast in all"


def test_arrivals_are_poisson_and_the_same_each_time() -> None:
    times = poisson(4000)
    assert times == poisson(4000)
    assert times[-1] == pytest.approx(4000, rel=0.05)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert sum(gap > 1 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)


def test_what_is_cheapest_comes_without_a_delay() -> None:
    for seconds in MODELS.values():
        plan = finished(tune(measured(seconds), [1.0], TARGET, 256))
        assert plan.rate
        assert plan.delay_s <= TARGET / 4
    patient = finished(tune(measured(MODELS["linear"]), [1.0], 20.0, 256))
    assert patient.delay_s == 0.0, "waiting brings nothing where everything is in time anyway"
    assert patient.rate <= 500


def test_where_no_plan_holds_the_target_some_run_together() -> None:
    plan = finished(tune(Curve([(1, 0.2), (2, 0.3)]), [1.0], TARGET, 256))
    assert plan.rate == 0.0
    assert plan.work == 8.0


def test_the_search_goes_in_small_pieces() -> None:
    search = tune(measured(MODELS["linear"]), [1.0], TARGET, 256)
    assert sum(1 for _ in search) > 100, "3000 requests are rehearsed some twenty times"


def test_a_plan_stays_unless_another_one_is_worth_it() -> None:
    curve = measured(MODELS["linear"])
    best = finished(tune(curve, [1.0], TARGET, 256))
    near = Plan(256, work=best.work - 1)
    kept = finished(tune(curve, [1.0], TARGET, 256, near))
    assert kept == replace(near, rate=kept.rate)
    assert kept.rate > 0.98 * best.rate
    assert kept.tried[0].rate == kept.rate, "it is tried first"
    left = finished(tune(curve, [1.0], TARGET, 256, Plan(256, work=1.0)))
    assert left.rate > 0.98 * best.rate
    names = [x.name for x in left.tried]
    assert len(names) == len(set(names))


def test_requests_that_no_plan_answers_in_time_do_not_spoil_it_for_others() -> None:
    mix = [1.0] * 9 + [40.0]
    plan = finished(tune(measured(MODELS["linear"]), mix, TARGET, 256))
    assert plan == finished(tune(measured(MODELS["linear"]), [1.0], TARGET, 256))


def test_a_target_that_only_few_requests_hold_is_said_with_their_rate() -> None:
    plan = finished(tune(Curve([(1, 0.045), (2, 0.09)]), [1.0], TARGET, 256))
    assert 0.1 < plan.rate < 0.5, "two that come within 40 ms of each other are late"
