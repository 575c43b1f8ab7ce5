"""The thread that runs a batched model."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from lezero.serve.batching.batcher import Batcher, FullError
from lezero.serve.batching.curve import Curve
from lezero.serve.batching.model import BatchedModel
from lezero.serve.batching.plan import Plan
from lezero.serve.batching.runner import FailedError, Runner, StoppedError


class Doubling(BatchedModel):
    """Twice a number. It waits for `gate`; 13 raises, 0 gives no number."""

    description = "doubles"

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.gate.set()
        self.steps: list[list[int]] = []

    def run(self, items: Sequence[Any]) -> Sequence[Any]:
        self.begun.set()
        assert self.gate.wait(20)
        self.steps.append(list(items))
        if 13 in items:
            raise RuntimeError("no luck")
        return [2 * x if x else float("nan") for x in items]

    def is_sound(self, answer: Any) -> bool:
        return answer == answer

    def samples(self) -> Iterator[list[Any]]:
        yield [1]


class Leaving(Doubling):
    """Ends the program for 14."""

    def run(self, items: Sequence[Any]) -> Sequence[Any]:
        if 14 in items:
            raise SystemExit(3)
        return super().run(items)


class Speechless(Doubling):
    """Raises for 14 what cannot even be told."""

    def run(self, items: Sequence[Any]) -> Sequence[Any]:
        class NoWordsError(Exception):
            def __str__(self) -> str:
                raise ValueError("no words")

        if 14 in items:
            raise NoWordsError
        return super().run(items)


class Unsure(Doubling):
    """Does not even know whether 14 is a number."""

    def is_sound(self, answer: Any) -> bool:
        if answer == 14:
            raise TypeError("what is this?")
        return super().is_sound(answer)


class Dying(Doubling):
    """Runs nothing any more after 15, as an accelerator after an index out of range."""

    dead, on_cpu, error = False, False, RuntimeError("device-side assert triggered")

    def run(self, items: Sequence[Any]) -> Sequence[Any]:
        self.dead |= 15 in items
        if self.dead:
            raise self.error
        return super().run(items)


class Asked:
    """What one request was told."""

    def __init__(self, runner: Runner, *items: int) -> None:
        self.outcome: Any = None
        self._told = threading.Event()
        self.ask = runner.submit(items, self._tell)

    def _tell(self, outcome: Any) -> None:
        assert not self._told.is_set(), "told twice"
        self.outcome = outcome
        self._told.set()

    def wait(self) -> Any:
        assert self._told.wait(20)
        return self.outcome


@pytest.fixture
def model() -> Doubling:
    return Doubling()


@pytest.fixture
def runner(model: Doubling) -> Iterator[Runner]:
    yield from running(model)


def running(model: Doubling) -> Iterator[Runner]:
    batcher = Batcher(Curve([(1, 0.001)]), target_s=60.0, waiting=5, plan=Plan(3))
    made = Runner(model, batcher)
    made.start()
    yield made
    model.gate.set()
    made.stop()


def test_answers_come_whole_and_in_order(runner: Runner, model: Doubling) -> None:
    asked = [Asked(runner, *range(1, n + 1)) for n in (1, 5, 2)]
    assert [a.wait() for a in asked] == [[2], [2, 4, 6, 8, 10], [2, 4]]
    assert runner.counts.ended["answered"] == 3
    assert runner.counts.items == 8
    assert len(runner.counts.latencies) == 3
    assert max(map(len, model.steps)) <= 3


def test_an_answer_that_cannot_be_judged_harms_no_other() -> None:
    for runner in running(Unsure()):
        asked = [Asked(runner, number) for number in (7, 2)]
        assert isinstance(asked[0].wait(), FailedError)
        assert asked[1].wait() == [4]
        assert Asked(runner, 3).wait() == [6]


@pytest.mark.parametrize("kind", [Leaving, Speechless])
def test_a_model_that_ends_the_program_or_cannot_say_why_harms_no_other(kind) -> None:
    for runner in running(kind()):
        asked = [Asked(runner, number) for number in (1, 14, 2)]
        assert asked[0].wait() == [2]
        assert isinstance(asked[1].wait(), FailedError)
        assert asked[2].wait() == [4]
        assert Asked(runner, 3).wait() == [6]
        assert runner.broken is None


def test_a_loop_that_fails_tells_those_who_wait(runner, model, monkeypatch, caplog) -> None:
    def fails(*given: Any, **options: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(runner.batcher, "done", fails)
    model.gate.clear()
    asked = [Asked(runner, *range(1, 8))]
    assert model.begun.wait(20)
    asked.append(Asked(runner, 9))
    model.gate.set()
    for one in asked:
        assert isinstance(one.wait(), FailedError)
    assert runner.broken == "KeyError: 'a bug'"
    assert runner.stalled_s() == 0
    assert runner.active == 0
    with pytest.raises(FailedError, match="has failed"):
        Asked(runner, 1)


@pytest.mark.parametrize("count", [1, 3])
def test_a_model_that_breaks_for_good_is_not_healthy(count: int) -> None:
    for runner in running(Dying()):
        assert isinstance(Asked(runner, 13).wait(), FailedError)
        assert runner.broken is None
        asked = Asked(runner, *[15, 1, 2][:count])
        assert isinstance(asked.wait(), FailedError)
        runner.stop()
        assert runner.broken == "RuntimeError: device-side assert triggered"
        assert runner.active == 0
        with pytest.raises(FailedError, match="for good"):
            Asked(runner, 1)


@pytest.mark.parametrize(
    ("on_cpu", "error"),
    [(True, RuntimeError("busy")), (False, MemoryError()), (False, torch.OutOfMemoryError())],
)
def test_a_model_that_may_recover_breaks_nothing(on_cpu: bool, error: Exception) -> None:
    model = Dying()
    model.on_cpu, model.error = on_cpu, error
    for runner in running(model):
        assert isinstance(Asked(runner, 15).wait(), FailedError)
        assert isinstance(Asked(runner, 1).wait(), FailedError)
        model.dead = False
        assert Asked(runner, 1).wait() == [2]
        assert runner.broken is None


def test_one_that_fails_harms_no_other(runner: Runner, model: Doubling) -> None:
    model.gate.clear()
    first = Asked(runner, 1)
    assert model.begun.wait(20)
    asked = [Asked(runner, 2), Asked(runner, 13), Asked(runner, 4)]
    nan = Asked(runner, 0)
    model.gate.set()
    assert first.wait() == [2]
    assert [asked[0].wait(), asked[2].wait()] == [[4], [8]]
    assert isinstance(asked[1].wait(), FailedError)
    assert isinstance(nan.wait(), FailedError)
    assert "not a number" in str(nan.outcome)
    assert runner.counts.failed_steps == 1
    assert Asked(runner, 5).wait() == [10]


def test_what_is_left_of_a_request_that_failed_does_not_run(runner, model) -> None:
    assert isinstance(Asked(runner, 13, *range(1, 9)).wait(), FailedError)
    assert Asked(runner, 50).wait() == [100]
    assert not {x for step in model.steps for x in step} & set(range(3, 9))


def test_each_request_that_fails_is_one_line_and_its_kind_one_traceback(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("lezero"), "propagate", True)
    for items in ([13], [13, 2], [13, 13]):
        assert isinstance(Asked(runner, *items).wait(), FailedError)
    said = [record.getMessage().splitlines() for record in caplog.records]
    assert [lines[0].partition(": ")[2] for lines in said] == ["RuntimeError: no luck"] * 3
    assert "Traceback" in said[0][1]
    assert [len(lines) for lines in said[1:]] == [1, 1]


def test_a_step_that_ran_again_teaches_nothing(runner, model, monkeypatch) -> None:
    learnt: list[float] = []
    monkeypatch.setattr(runner.batcher.curve, "learn", lambda work, seconds: learnt.append(work))
    run, failures = model.run, [RuntimeError("only once")]

    def sometimes(items: Sequence[Any]) -> Sequence[Any]:
        if len(items) > 1 and failures:
            raise failures.pop()
        return run(items)

    monkeypatch.setattr(model, "run", sometimes)
    assert Asked(runner, 1, 2).wait() == [2, 4]
    assert Asked(runner, 3).wait() == [6]
    assert not failures
    runner.stop()
    assert learnt == [1.0]


def test_the_queue_is_bounded_and_cancelled_requests_make_room(runner, model) -> None:
    model.gate.clear()
    first = Asked(runner, 1)
    assert model.begun.wait(20)
    waiting = [Asked(runner, n) for n in range(2, 7)]
    with pytest.raises(FullError):
        Asked(runner, 9)
    runner.cancel(waiting[0].ask)
    assert isinstance(waiting[0].wait(), StoppedError)
    last = Asked(runner, 9)
    runner.cancel(first.ask)
    assert isinstance(first.wait(), StoppedError), "though it runs"
    model.gate.set()
    assert last.wait() == [18]
    assert [2] not in model.steps
    assert runner.active == 0 or waiting[-1].wait()
    runner.cancel(last.ask)


def test_stopping_tells_those_that_wait(model: Doubling) -> None:
    batcher = Batcher(Curve([(1, 0.001)]), target_s=60.0, waiting=9, plan=Plan(1))
    runner = Runner(model, batcher)
    runner.start()
    model.gate.clear()
    Asked(runner, 1)
    assert model.begun.wait(20)
    waits = Asked(runner, 2)
    assert runner.stalled_s() > 0
    threading.Timer(0.05, model.gate.set).start()
    runner.stop()
    assert isinstance(waits.wait(), StoppedError)
    assert runner.active == 0


def test_plans_are_looked_for_when_nothing_runs_and_a_little_under_load(model: Doubling) -> None:
    curve = Curve([(1, 0.1), (2, 0.2)])
    told: list[int] = []
    made = Batcher(curve, target_s=60.0, waiting=500)
    runner = Runner(model, made, tell_plan=lambda: told.append(made.plans))
    runner.start()
    try:
        for _ in range(5):  # a busy machine may measure steps that change no plan
            asked = [Asked(runner, 1) for _ in range(200)]
            assert all(a.wait() == [2] for a in asked)
            began = time.monotonic()
            while not told and time.monotonic() - began < 4:
                time.sleep(0.01)
            if told:
                break
        assert told, "much faster than it seemed; nobody asked since"
        found: list[float] = []
        runner.batcher.search = lambda: found.append(time.sleep(0.001) or 0.001)  # type: ignore
        runner._spare_s = 0.0
        for _ in range(100):
            runner._search_under_load(0.004)
        assert 1 <= len(found) <= 9, "2% of 0.4 s, a millisecond each"
    finally:
        runner.stop()


def test_what_comes_after_all_were_cancelled_is_refused(runner: Runner) -> None:
    assert Asked(runner, 1).wait() == [2]
    runner.cancel_all()
    with pytest.raises(StoppedError, match="the server is shutting down"):
        Asked(runner, 1)
    assert runner.active == 0
