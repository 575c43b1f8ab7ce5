"""Ranks that a launcher starts again: what they go on with, and what they leave."""

from __future__ import annotations

import pytest

from lezero.core import groups
from lezero.train import recipe
from tests.train.runs import filled_cache, one_thread
from tests.train.test_trainer import Recorder, steps_in, train

__all__ = ["filled_cache", "one_thread"]
pytestmark = pytest.mark.usefixtures("one_thread")

ANEW = {"train__steps": 4, "checkpoint": {"every": 2, "resume": False}}


def killed(*_):
    raise RuntimeError("killed")


def count_restarts(monkeypatch, restarts, launch="a"):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)


def test_a_run_that_begins_anew_does_so_after_a_restart_before_its_first_step(
    tmp_path, monkeypatch
):
    count_restarts(monkeypatch, 0)
    train(tmp_path, train__steps=6, checkpoint={"every": 2})
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "build_data", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(tmp_path, **ANEW)
    assert steps_in(tmp_path) == [2, 4, 6]
    count_restarts(monkeypatch, 1)
    train(tmp_path, recorder := Recorder(), **ANEW | {"train__steps": 3})
    assert recorder.steps() == [1, 2, 3]
    assert steps_in(tmp_path) == [2, 3]


def test_ranks_that_are_started_again_go_on_with_what_their_launch_wrote_alone(
    tmp_path, monkeypatch
):
    count_restarts(monkeypatch, 0)
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, Recorder(at3=killed), **ANEW)
    count_restarts(monkeypatch, 1)
    train(tmp_path, recorder := Recorder(), **ANEW)
    assert recorder.steps() == [3, 4]
    count_restarts(monkeypatch, 1, "another, of which no rank had come so far")
    train(tmp_path, recorder := Recorder(), **ANEW)
    assert recorder.steps() == [1, 2, 3, 4]


def started(monkeypatch, launcher, starts):
    monkeypatch.setenv("LEZERO_LAUNCH", launcher)
    monkeypatch.setenv("LEZERO_STARTS", str(starts))


def test_ranks_of_another_machine_go_on_with_what_their_launch_wrote(tmp_path, monkeypatch):
    """Where a machine comes, torch counts no restart, and the first rank may be a new one."""
    count_restarts(monkeypatch, 0, "lezero")
    started(monkeypatch, "a", 0)
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, Recorder(at3=killed), **ANEW)
    with monkeypatch.context() as patch:
        found = {("b", 0): [("b", 0), ("a", 1)]}
        told = lambda mine: found[mine] if isinstance(mine, tuple) else [mine]  # noqa: E731
        patch.setattr(groups, "gather_objects", told)
        started(patch, "b", 0)
        train(tmp_path, recorder := Recorder(), **ANEW | {"train__steps": 3})
        assert recorder.steps() == [3]
    started(monkeypatch, "b", 1)  # "a" has gone
    train(tmp_path, recorder := Recorder(), **ANEW)
    assert recorder.steps() == [4]
    started(monkeypatch, "c", 1)  # of another launch
    train(tmp_path, recorder := Recorder(), **ANEW)
    assert recorder.steps() == [1, 2, 3, 4]
    started(monkeypatch, "c", 0)  # the program trains it once more
    train(tmp_path, recorder := Recorder(), **ANEW)
    assert recorder.steps() == [1, 2, 3, 4]
