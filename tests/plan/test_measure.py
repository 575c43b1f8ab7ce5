"""Operations timed alone."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lezero.plan import forecast, measure
from lezero.plan.calls import Call, TensorFact
from lezero.plan.measure import OpTimes, Timed, time_call
from lezero.plan.spec import StepSpec

aten = torch.ops.aten


def fact(*shape: int, dtype: torch.dtype = torch.float32) -> TensorFact:
    stride = torch.empty(shape, device="meta").stride()
    return TensorFact(shape, tuple(stride), dtype)


def product(m: int, k: int, n: int) -> Call:
    return Call(aten.mm.default, (fact(m, k), fact(k, n)), {}, "aten.mm.default")


def test_a_call_that_cannot_run_alone_gives_nothing() -> None:
    assert time_call(Call(aten.mm.default, (fact(2, 3), fact(5, 2)), {}, "aten.mm.default")) is None


def test_a_module_with_an_lstm_is_forecast() -> None:
    """oneDNN's backward reads a workspace of its own form: made up, it ended the process."""

    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = torch.nn.LSTM(16, 32, batch_first=True), torch.nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.lstm(x)[0])
            return out

    spec = StepSpec(
        batch=4,
        tokens=8,
        loss=lambda model, batch: model(batch).square().mean(),
        inputs=lambda batch, tokens: torch.randn(batch, tokens, 16),
    )
    assert forecast(Recurrent, spec).memory_bytes > 0


def test_what_cannot_be_made_small_enough_is_not_tried() -> None:
    vast = fact(1 << 40)
    assert time_call(Call(aten.ones.default, ((1 << 40,),), {}, "aten.ones", (vast,))) is not None
    assert time_call(Call(aten.sum.default, (), {}, "aten.sum", (vast,) * 1024)) is None


def test_neighbours_compute_meanwhile_and_stop() -> None:
    before = threading.active_count()
    timed = time_call(product(64, 64, 64), neighbours=2)
    assert timed is not None
    assert threading.active_count() == before


def test_disturbed_times_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "a": [Timed(9.0, False), Timed(5.0, False), Timed(1.0, True)],
        "b": [Timed(2.0, True)],
    }
    monkeypatch.setattr(measure, "time_call", lambda call, *_: answers[call.key].pop(0))
    times = OpTimes("a machine", None)
    calls = [Call(aten.add.Tensor, (fact(4), fact(4)), {}, key) for key in ("a", "b")]
    assert times.measure(calls) == {"a": 1.0, "b": 2.0}
    assert times.measured == 2


def test_when_nothing_is_quiet_the_best_counts_and_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([3.0, 2.0, 4.0, 5.0])
    monkeypatch.setattr(measure, "time_call", lambda *_: Timed(next(answers), False))
    times = OpTimes("a machine", None)
    assert times.measure([Call(aten.add.Tensor, (fact(4), fact(4)), {}, "a")]) == {"a": 2.0}
    assert not times.seconds


def test_a_slow_call_runs_once_after_the_one_that_makes_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "_SLOW_SECONDS", 0.001)
    naps = iter([0.5, 0.01])
    timed = time_call(Call(lambda: time.sleep(next(naps)), (), {}, "nap"))
    assert timed is not None
    assert 0.01 <= timed.seconds < 0.4
    assert not list(naps)


def test_the_work_of_an_accelerator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = set[torch.device]()
    monkeypatch.setattr(measure.device, "synchronize", waited.update)
    place = torch.device("cuda", 1)
    measure._time(lambda: None, place)
    assert waited == {place}


def test_operations_are_timed_where_the_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    places = []

    def sets(call: Call, place: str) -> None:
        places.append(place)
        raise RuntimeError("there is none here")

    monkeypatch.setattr(measure, "argument_sets", sets)
    spec = StepSpec(batch=1, tokens=8, device="cuda")
    times = OpTimes.of_this_machine(spec)
    times.measure([product(64, 64, 64)])
    assert set(places) == {"cuda"}


def test_threads_are_those_of_a_rank_meanwhile_and_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure.facts, "usable_cores", lambda: 8)
    before = torch.get_num_threads()
    with measure.as_in_a_step(StepSpec(batch=1, tokens=1, ranks=2)):
        assert torch.get_num_threads() == 4
    assert torch.get_num_threads() == before
