"""The best generation of a run: marked after its validation, kept, and really there."""

from __future__ import annotations

import math

import pytest

from lezero import checkpoint
from lezero.checkpoint.crew import Crew
from lezero.core.errors import FileError
from lezero.files import list_generations, step_of
from lezero.train import Callback, Trainer
from lezero.train.engine import Engine
from tests.train.runs import config, filled_cache, one_thread

__all__ = ["filled_cache", "one_thread"]
pytestmark = pytest.mark.usefixtures("one_thread")


class Waits(Callback):
    """Gives each generation the time to reach the disk, or not to."""

    def on_step(self, trainer, result):
        trainer.saver.wait()


def train(folder, told, **changes):
    """A run whose validations give these losses."""
    losses = iter(told)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "evaluate", lambda engine, batches: next(losses))
        changes = {"validation": {"every": 2}, **changes}
        trainer = Trainer(config(folder, **changes), [Waits()])
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


def test_the_best_begins_anew_on_another_validation_set(tmp_path, capsys):
    told = "the validation set changed since the checkpoint: 'best' begins anew, its loss of 2 was"
    changes = {"checkpoint": {"every": 2}}
    assert train(tmp_path, [2.0, 3.0], train__steps=4, **changes)[:2] == (2.0, 2)
    assert train(tmp_path, [2.5], train__steps=6, **changes)[:2] == (2.0, 2)
    assert told not in capsys.readouterr().out
    changes["validation"] = {"every": 2, "batches": 1}
    assert train(tmp_path, [4.0, 3.5], train__steps=10, **changes)[:2] == (3.5, 10)
    assert told in capsys.readouterr().out.replace("\n", " ")
