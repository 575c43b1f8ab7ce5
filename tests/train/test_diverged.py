"""A run whose steps are skipped keeps the checkpoints of before, and goes on from them."""

from __future__ import annotations

import math
import shutil

import pytest
import torch

from lezero import checkpoint
from lezero.core.errors import NumericsError
from lezero.files import step_path
from tests.train.runs import filled_cache, one_thread
from tests.train.test_trainer import Recorder, steps_in, train

__all__ = ["filled_cache", "one_thread"]
pytestmark = pytest.mark.usefixtures("one_thread")
CHANGES = {
    "train__max_skipped": 6, "validation": {"every": 0}, "checkpoint": {"every": 2, "keep": 2},
}  # fmt: skip


@torch.no_grad()
def ruin(trainer):
    """As one bad update does: the weights are finite, and no backward pass over them is."""
    for parameter in trainer.model.parameters():
        parameter.mul_(1e30)


@torch.no_grad()
def poison(trainer):
    weight = trainer.model.layers[1].mlp.gate_proj.weight
    trainer.before = weight.clone()
    weight[0, 0] = math.nan


@torch.no_grad()
def heal(trainer):
    trainer.model.layers[1].mlp.gate_proj.weight.copy_(trainer.before)


def test_a_diverged_run_keeps_its_checkpoints_and_a_later_start_goes_on_from_them(tmp_path):
    with pytest.raises(NumericsError, match="step 6 in a row") as caught:
        train(tmp_path, Recorder(at7=ruin), **CHANGES)
    root = tmp_path / "run/checkpoints"
    assert steps_in(tmp_path) == [4, 6]
    assert str(caught.value).endswith(
        f"a later start goes on from {step_path(root, 6)}; where it ends in the same way, move "
        "that folder away, and the next goes on from step-00000004"
    )
    again = Recorder()
    assert train(tmp_path, again, train__steps=9, **CHANGES)[0].step == 9
    assert again.steps() == [7, 8, 9]
    assert not [text for text in again.events() if "skipped" in text]
    weights = checkpoint.load(root).section("model").values()
    assert max(float(weight.abs().max()) for weight in weights) < 100


def test_the_way_back_from_a_checkpoint_of_ruined_weights(tmp_path):
    with pytest.raises(NumericsError):
        train(tmp_path, Recorder(at6=ruin), **CHANGES)
    assert steps_in(tmp_path) == [4, 6]
    with pytest.raises(NumericsError, match=r"move that folder away, .* from step-00000004$"):
        train(tmp_path, **CHANGES)
    step_path(tmp_path / "run/checkpoints", 6).rename(tmp_path / "away")
    again = Recorder()
    train(tmp_path, again, train__steps=8, **CHANGES)
    assert again.steps() == [5, 6, 7, 8]


def test_without_a_checkpoint_a_later_start_begins_anew(tmp_path):
    with pytest.raises(NumericsError, match="No checkpoint was written: a later start begins"):
        train(tmp_path, Recorder(at1=ruin), **CHANGES)


def test_a_save_that_is_due_at_a_skipped_step_comes_at_the_next_good_one(tmp_path):
    recorder = Recorder(at3=poison, at4=heal)
    train(tmp_path, recorder, train__steps=9, **CHANGES)
    assert [call[1] for call in recorder.calls if call[0] == "checkpoint"] == [2, 5, 6, 8, 9]


@pytest.mark.parametrize("steps", [20, 9])
def test_a_run_that_ends_at_a_skipped_step_keeps_the_checkpoint_before(tmp_path, steps):
    """Stopped there, and at its last step."""
    stop = {"at9": lambda t: t.engine.request_stop()} if steps == 20 else {}
    changes = CHANGES | {"checkpoint": {"every": 2, "keep": 1}, "train__max_skipped": 20}
    recorder = Recorder(at5=ruin, **stop)
    result, _ = train(tmp_path, recorder, train__steps=steps, **changes)
    assert (result.step, result.exit_status) == (10 if steps == 20 else 9, 0)
    assert steps_in(tmp_path) == [4, result.step]
    said = f"step {result.step} was skipped ({result.step - 5} in a row)"
    kept = "step-00000004 stays beside it, marked 'before-skips'"
    assert [t for t in recorder.events() if t.startswith(said) and kept in t]
    again = Recorder(**{f"at{result.step + 1}": lambda t: t.engine.request_stop()})
    train(tmp_path, again, train__steps=20, **changes)  # goes on from it, and skips on
    assert checkpoint.read_mark(tmp_path / "run/checkpoints", "before-skips") == 4
    assert steps_in(tmp_path)[0] == 4
    for step in steps_in(tmp_path)[1:]:
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{step:08d}")
    again = Recorder()
    train(tmp_path, again, train__steps=7, **changes)
    assert again.steps() == [5, 6, 7]


def test_a_stop_at_a_skipped_step_saves_it_where_there_is_no_other(tmp_path):
    changes = CHANGES | {"checkpoint": {"every": 0}}
    recorder = Recorder(at3=poison, at4=lambda t: t.engine.request_stop(), at5=heal)
    train(tmp_path, recorder, **changes)
    assert steps_in(tmp_path) == [5]
    assert checkpoint.load(tmp_path / "run").documents["state"]["skipped_in_a_row"] == 2
    again = Recorder()
    train(tmp_path, again, train__steps=7, **changes)
    assert again.steps() == [6, 7]


def test_a_skipped_step_is_not_the_best_one(tmp_path):
    """Its loss may be finite all the same."""
    changes = CHANGES | {"validation": {"every": 2}, "checkpoint": {"every": 1}}
    skips = Recorder(at2=lambda t: setattr(t.engine, "skipped_in_a_row", 1))
    train(tmp_path, skips, train__steps=2, **changes)
    assert checkpoint.read_mark(tmp_path / "run/checkpoints", "best") is None
    assert checkpoint.read_mark(tmp_path / "run/checkpoints", "before-skips") == 1
