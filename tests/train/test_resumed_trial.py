"""A trial of forms that a stop interrupted, in the run that goes on."""

from __future__ import annotations

import pytest

from lezero.optim import AdamW
from lezero.train import engine_state, tuning
from lezero.train.engine import Engine
from lezero.train.loss import next_token_loss
from tests.train.test_speed import Model, PlainBlock, batch, compiler

__all__ = ["compiler"]


@pytest.fixture(autouse=True)
def compiles(monkeypatch):
    monkeypatch.setattr(tuning, "compiler_problem", lambda place: "")


def engine(total_steps):
    model = Model(block=PlainBlock)
    return Engine(
        model, AdamW(model), loss=next_token_loss, precision="fp32", attention="torch",
        total_steps=total_steps,
    )  # fmt: skip


def interrupted(path, monkeypatch):
    """Where a run of 100,000 steps was saved, whose first three were taken plainly to time them."""
    monkeypatch.setattr(tuning, "_TYPICAL_COMPILE_S", 0.0)
    first = engine(100_000)
    for i in range(3):
        first.train_step(batch(i))
    assert (first.tuner.ahead, first.tuner.trying) == (100_000, True)
    return first.save(path)


def test_a_run_of_another_length_judges_by_the_steps_that_are_left(tmp_path, monkeypatch):
    path = interrupted(tmp_path, monkeypatch)
    monkeypatch.setattr(tuning, "_TYPICAL_COMPILE_S", 100.0)
    shorter = engine(5)
    shorter.load(path)
    shorter.train_step(batch(3))
    assert not shorter.tuner.trying
    record = shorter.decisions.records["compile"]
    assert record.chosen == "eager"
    assert "too short" in str(record.candidates)

    longer = engine(2_000_000_000)
    longer.load(path)
    longer.train_step(batch(3))
    assert longer.tuner.ahead == 2_000_000_000 - 3
    assert len(longer.tuner.taken) == 1


def test_a_generation_that_does_not_say_its_length_goes_on_as_it_began(tmp_path, monkeypatch):
    path = interrupted(tmp_path, monkeypatch)
    for total_steps, ahead in ((100_000, 100_000), (200_000, None)):
        again = engine(total_steps)
        loaded = engine_state.find(again, path)
        engine_state.restore(again, loaded)
        assert again.tuner.ahead == ahead
        del loaded.documents["state"]["total_steps"]
        engine_state.restore(again, loaded)
        assert (again.tuner.ahead, len(again.tuner.taken)) == (100_000, 3)
