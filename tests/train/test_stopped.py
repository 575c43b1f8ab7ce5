"""What a stopped run makes up for when it goes on, and a run among its own texts."""

from __future__ import annotations

import os
import signal

import pytest

from lezero import checkpoint
from lezero.train.run_documents import RunDocuments
from lezero.train.run_facts import RunFacts
from tests.train.runs import TEXT, filled_cache, one_thread, settings
from tests.train.test_trainer import Recorder, finished, train

__all__ = ["filled_cache", "finished", "one_thread"]
pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_may_lie_among_its_texts(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "text.txt").write_text(TEXT, encoding="utf-8")
    changes = {"run": str(texts / "run"), "data__train": [str(texts)]}
    for steps in (2, 4):
        result, trainer = train(tmp_path, train__steps=steps, **changes)
        assert trainer.data.findings["files"] == 1
        assert not trainer.data.findings["left_out"]
    assert (result.step, trainer.resumed_from) == (4, 2)


@pytest.mark.parametrize(("asked", "due"), [(9, 10), (20, 20)])
def test_a_validation_that_a_stop_left_out_is_caught_up(finished, tmp_path, asked, due):
    """Asked before the step of the validation, which is left out then, or just before itself."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    changes = {"data": settings(finished[0])["data"], "report__tensorboard": True}

    def stop(trainer):
        os.kill(os.getpid(), signal.SIGTERM)

    recorder = Recorder(**{f"at{asked}": stop})
    result, _ = train(tmp_path, recorder, **changes)
    assert (result.step, result.exit_status) == (due, 143)
    assert ("validation", due) not in recorder.calls
    recorder = Recorder()
    result, trainer = train(tmp_path, recorder, **changes)
    assert recorder.calls.count(("validation", due)) == 1
    assert (result.step, result.exit_status) == (20, 0)
    whole = RunFacts(RunDocuments.read(finished[0] / "run"))
    assert RunFacts(RunDocuments.read(tmp_path / "run")).validation == whole.validation
    steps, losses = whole.validation
    board = events.EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    shown = board.Scalars("loss/validation")
    assert [item.step for item in shown] == list(steps)
    assert [item.value for item in shown] == pytest.approx(list(losses))
    assert (result.validation_loss, trainer.best) == (losses[-1], min(losses))
    best = checkpoint.read_mark(tmp_path / "run/checkpoints", "best")
    assert best == checkpoint.read_mark(finished[0] / "run/checkpoints", "best")
    recorder = Recorder()
    assert train(tmp_path, recorder, **changes)[0] == result
    assert not [call for call in recorder.calls if call[0] == "validation"], "it is done"
