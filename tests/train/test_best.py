"""The best generation of a run: marked after its validation, kept, and really there."""

from __future__ import annotations

import math
import shutil
import threading

import pytest

from lezero import checkpoint
from lezero.checkpoint import saver
from lezero.checkpoint.crew import Crew
from lezero.core.errors import FileError
from lezero.files import list_generations, step_of, step_path
from lezero.train import Callback, Trainer
from lezero.train.engine import Engine
from tests.train.runs import config, filled_cache, one_thread

__all__ = ["filled_cache", "one_thread"]
pytestmark = pytest.mark.usefixtures("one_thread")


class Waits(Callback):
    """Gives each generation the time to reach the disk, or not to."""

    def on_step(self, trainer, result):
        trainer.saver.wait()


def train(folder, told, callback=None, **changes):
    """A run whose validations give these losses."""
    losses = iter(told)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "evaluate", lambda engine, batches: next(losses))
        changes = {"validation": {"every": 2}, **changes}
        trainer = Trainer(config(folder, **changes), [callback or Waits()])
        trainer.run()
    root = trainer.folder.checkpoints
    steps = [step_of(path) for path in list_generations(root)]
    return trainer.best, checkpoint.read_mark(root, "best"), steps


def test_the_best_generation_outlives_its_turn(tmp_path):
    losses = [3.0, 2.0, 2.5, 4.0, 2.1, math.nan]
    changes = {"train__steps": 12, "checkpoint": {"every": 2, "keep": 1}}
    assert train(tmp_path, losses, **changes) == (2.0, 4, [4, 12])


def test_a_best_generation_that_was_not_written_is_not_the_best(tmp_path, monkeypatch):
    write = Crew.write

    def full(crew, root, step, *rest):
        if step == 4:
            raise FileError("the disk is full")
        write(crew, root, step, *rest)

    monkeypatch.setattr(Crew, "write", full)
    changes = {"train__steps": 8, "checkpoint": {"every": 8}}
    assert train(tmp_path, [3.0, 2.0, 2.5, 2.9], **changes)[:2] == (2.5, 6)


def test_of_several_that_were_not_written_none_is_the_best(tmp_path, monkeypatch):
    """Of step 4 that is heard only after step 6 was validated, too."""
    validated, write = threading.Event(), Crew.write

    def slow_and_full(crew, root, step, *rest):
        if step == 4:
            validated.wait(60)
        if step in (4, 6):
            raise FileError("the disk is full")
        write(crew, root, step, *rest)

    class Waits(Callback):
        def on_step(self, trainer, result):
            if result.step == 7:
                trainer.saver.wait()

        def on_validation(self, trainer, loss):
            if trainer.engine.step == 6:
                validated.set()

    monkeypatch.setattr(Crew, "write", slow_and_full)
    changes = {"train__steps": 8, "checkpoint": {"every": 8}}
    assert train(tmp_path, [5.0, 4.0, 3.0, 4.5], Waits(), **changes)[:2] == (4.5, 8)


def test_a_best_generation_that_a_kill_left_without_its_mark_gets_it(tmp_path, monkeypatch):
    changes = {"checkpoint": {"every": 2, "keep": 1}}
    with monkeypatch.context() as patch:
        patch.setattr(saver, "write_mark", lambda root, name, step: None)
        assert train(tmp_path, [3.0, 2.0], train__steps=4, **changes) == (2.0, None, [4])
    assert train(tmp_path, [2.5, 2.6], train__steps=8, **changes) == (2.0, 4, [4, 8])


def test_the_best_begins_anew_on_another_validation_set(tmp_path, capsys):
    told = "the validation set changed since the checkpoint: 'best' begins anew, its loss of 2 was"
    changes = {"checkpoint": {"every": 2}}
    assert train(tmp_path, [2.0, 3.0], train__steps=4, **changes)[:2] == (2.0, 2)
    assert train(tmp_path, [2.5], train__steps=6, **changes)[:2] == (2.0, 2)
    assert told not in capsys.readouterr().out
    changes["validation"] = {"every": 2, "batches": 1}
    assert train(tmp_path, [4.0, 3.5], train__steps=10, **changes)[:2] == (3.5, 10)
    assert told in capsys.readouterr().out.replace("\n", " ")


def test_a_resume_leaves_a_damaged_mark_and_what_it_may_mean(tmp_path, capsys):
    changes = {"checkpoint": {"every": 1, "keep": 1}}
    assert train(tmp_path, [2.0, 3.0], train__steps=4, **changes)[1:] == (2, [2, 4])
    mark = tmp_path / "run/checkpoints/best.json"
    raw = bytearray(mark.read_bytes())
    raw[30] ^= 1
    mark.write_bytes(raw)
    with pytest.raises(FileError):
        train(tmp_path, [3.0, 2.5], train__steps=8, **changes)
    assert "the mark 'best' is damaged" in capsys.readouterr().out.replace("\n", " ")
    assert mark.read_bytes() == raw
    assert (mark.parent / "step-00000002").is_dir()
    assert train(tmp_path, [1.5], train__steps=10, **changes)[:2] == (1.5, 10), "written anew"


class Saves(Waits):
    """Saves step 2 by its own hand, which comes before the validation of that step."""

    def on_step(self, trainer, result):
        if result.step == 2:
            trainer.save()
        super().on_step(trainer, result)
        if result.step == 3:
            raise RuntimeError("killed")


def test_a_callback_may_save_the_step_that_is_validated_next(tmp_path):
    """What is marked best knows its own loss, so that a worse one does not take its place."""
    changes = {"train__steps": 4, "checkpoint": {"every": 50}}
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, [2.0], Saves(), **changes)
    told = (tmp_path / "run/metrics.jsonl").read_text()
    assert '"text":"validation loss 2 of step 2"' in told
    saved = checkpoint.load(tmp_path / "run", mark="best").documents["progress"]
    assert (saved["best"], saved["validation_loss"], saved["owes_validation"]) == (2.0, 2.0, False)
    assert train(tmp_path, [3.0], **changes)[:2] == (2.0, 2)


def test_a_run_that_dies_before_its_validation_catches_up(tmp_path):
    changes = {"train__steps": 4, "checkpoint": {"every": 50}}
    with pytest.raises(StopIteration):  # there is no loss to tell
        train(tmp_path, [], Saves(), **changes)
    assert train(tmp_path, [2.0, 3.0], **changes)[:2] == (2.0, 2)


def test_where_the_last_step_alone_is_written_it_alone_can_be_the_best(tmp_path):
    last = {"checkpoint": {"every": 0}}
    assert train(tmp_path, [3.0, 1.0, 2.0], train__steps=6, **last) == (2.0, 6, [6])
    # Better losses of steps that nobody wrote are not remembered; better ones that are written are.
    assert train(tmp_path, [1.0, 1.9], train__steps=10, **last) == (1.9, 10, [6, 10])
    every = {"checkpoint": {"every": 2, "keep": 1}}
    assert train(tmp_path, [1.5, 1.8], train__steps=14, **every) == (1.5, 12, [12, 14])


def test_what_a_callback_saves_may_be_the_best(tmp_path):
    class Saves(Waits):
        def on_validation(self, trainer, loss):
            if trainer.engine.step == 2:
                trainer.save()

    found = train(tmp_path, [1.0, 2.0, 3.0], Saves(), train__steps=6, checkpoint={"every": 0})
    assert found == (1.0, 2, [2, 6])


def test_a_best_generation_that_is_gone_is_not_the_best(tmp_path):
    changes = {"checkpoint": {"every": 2, "keep": 1}}
    assert train(tmp_path, [1.0, 2.0], train__steps=4, **changes) == (1.0, 2, [2, 4])
    shutil.rmtree(step_path(tmp_path / "run/checkpoints", 2))
    assert train(tmp_path, [1.7, 1.8], train__steps=8, **changes) == (1.7, 6, [6, 8])


def test_a_last_step_that_is_the_best_is_marked_so_at_its_second_try(tmp_path, monkeypatch):
    write, tried = Crew.write, []

    def full_once(crew, root, step, *rest):
        tried.append(step)
        if tried.count(8) == 1 and step == 8:
            raise FileError("the disk is full")
        write(crew, root, step, *rest)

    monkeypatch.setattr(Crew, "write", full_once)
    changes = {"train__steps": 8, "checkpoint": {"every": 2}}
    assert train(tmp_path, [3.0, 2.5, 2.9, 2.0], **changes)[:2] == (2.0, 8)
    assert tried.count(8) == 2
    newest = step_path(tmp_path / "run" / "checkpoints", 8)
    progress = checkpoint.load(newest).documents["progress"]
    assert (progress["best"], progress["best_step"]) == (2.0, 8)
