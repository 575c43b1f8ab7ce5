"""Compiled forms that fail: when `auto` tries them, or later in the run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lezero.core import groups
from lezero.core.decisions import Decision
from lezero.train import speed, tuning
from lezero.train.engine import Engine

WHY = "torch.compile does not support double backward"


@pytest.fixture
def stub(monkeypatch):
    """A compiler whose code counts its calls and takes no gradient of a gradient."""
    calls = []

    def compiled(loss, options):
        def run(model, batch):
            calls.append(1)
            value = loss(model, batch)
            if loss.late:
                raise RuntimeError(f"{WHY}\nand more lines")
            return value

        return run

    monkeypatch.setattr(speed.torch, "compile", compiled)
    monkeypatch.setattr(speed, "compiler_problem", lambda place: "")
    return calls


class Loss:
    late, broken = False, False

    def __call__(self, model, x):
        if self.broken:
            raise KeyError("the user's own")
        return model(x).square().mean()


def made(compile="auto", chosen="step"):
    """An engine whose run had chosen this form, and its loss."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1)), Loss()
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), 0.1), loss=loss, counted="samples",
        precision="fp32", compile=compile, attention="torch", accumulate=2,
    )  # fmt: skip
    figures = {"eager": {"s": 9.0}, "step": {"s": 4.0}}
    engine.decisions.replay["compile"] = Decision("compile", chosen, figures, "s", "timed")
    return engine, loss


def train(engine, loss, late):
    data = torch.randn(8, 8, 2, generator=torch.Generator().manual_seed(1))
    losses = []
    for k, x in enumerate(data[engine.step :]):
        loss.late = k >= late
        losses.append(engine.train_step(x).loss)
    return losses


def test_it_is_left_for_good_and_the_step_taken_plainly(stub, tmp_path, caplog):
    plain, ours = made("off"), made()
    assert train(*plain, late=3) == train(*ours, late=3)
    for mine, same in zip(
        ours[0].model.state_dict().values(), plain[0].model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, same)
    assert len(stub) == 2 * 3 + 1
    assert ours[0].tuner.form.name == "eager"
    told = [r.getMessage() for r in caplog.records if "'step' failed in step 4" in r.getMessage()]
    assert len(told) == 1
    assert WHY in told[0]

    record = ours[0].decisions.records["compile"]
    assert (record.chosen, record.step, record.replayed) == ("eager", 3, False)
    assert record.candidates == {"eager": {"s": 9.0}, "step": {"s": None, "failed": WHY}}
    again, _ = made()
    again.load(ours[0].save(tmp_path))
    again.train_step(torch.ones(8, 2))
    assert again.tuner.form.name == "eager"
    assert len(stub) == 7


def test_what_a_plain_step_raises_too_is_the_users_own(stub):
    engine, loss = made()
    train(engine, loss, late=9)
    loss.broken = True
    with pytest.raises(KeyError, match="the user's own"):
        engine.train_step(torch.ones(8, 2))
    assert engine.tuner.form.name == engine.decisions.records["compile"].chosen == "step"
    loss.broken, before = False, len(stub)
    engine.train_step(torch.ones(8, 2))
    assert len(stub) == before + 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_that_was_asked_for_or_that_other_ranks_have_stays(stub, monkeypatch, ranks):
    engine, _ = made("step" if ranks == 1 else "auto")
    engine.train_step(torch.ones(8, 2))
    monkeypatch.setattr(tuning.groups, "world_size", lambda: ranks)
    assert not engine.tuner.failed(RuntimeError(WHY))
    assert engine.tuner.form.name == "step"
    assert groups.world_size() == ranks


def test_every_form_may_fail_on_trial_and_each_step_is_taken_plainly(monkeypatch, tmp_path, caplog):
    def compiled(compute, options):
        def run(*given):
            raise RuntimeError(WHY)

        return run

    monkeypatch.setattr(speed.torch, "compile", compiled)
    monkeypatch.setattr(tuning, "compiler_problem", lambda place: "")
    monkeypatch.setattr(tuning, "_TYPICAL_COMPILE_S", 0.0)

    def of_blocks(compile):
        torch.manual_seed(0)
        model, loss = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Loss()
        engine = Engine(
            model, torch.optim.SGD(model.parameters(), 0.1), loss=loss, counted="samples",
            precision="fp32", compile=compile, attention="torch", accumulate=2,
        )  # fmt: skip
        return engine, loss

    plain, ours = of_blocks("off"), of_blocks("auto")
    data = torch.randn(8, 8, 2, generator=torch.Generator().manual_seed(1))
    forms, kept = [], []
    for x in data:
        assert ours[0].train_step(x).loss == plain[0].train_step(x).loss
        forms.append(ours[0].tuner.form.name)
        kept.append(ours[0].save(tmp_path / str(len(forms))))
    assert forms == ["eager"] * 3 + ["blocks", "step"] + ["eager"] * 3
    record = ours[0].decisions.records["compile"]
    assert record.chosen == "eager"
    assert [record.candidates[name]["failed"] for name in ("blocks", "step")] == [WHY, WHY]
    told = [r.getMessage() for r in caplog.records if "failed on trial" in r.getMessage()]
    assert told == [
        f"compile: '{name}' failed on trial and is left out: {WHY}" for name in ("blocks", "step")
    ]
    for step in (4, 5):  # a resume takes the step that the interrupted run would have taken
        again, _ = of_blocks("auto")
        again.load(kept[step - 1])
        again.train_step(data[step])
        assert again.tuner.form.name == forms[step]


def test_a_trial_that_is_interrupted_between_its_forms_begins_anew(stub, monkeypatch):
    def interrupted(place):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "_TYPICAL_COMPILE_S", 0.0)
    monkeypatch.setattr(tuning, "compiler_problem", interrupted)
    engine, _ = made()
    engine.decisions.replay.clear()
    data = torch.randn(20, 8, 2, generator=torch.Generator().manual_seed(1))
    for x in data[:3]:
        engine.train_step(x)
    with pytest.raises(KeyboardInterrupt):
        engine.train_step(data[3])
    monkeypatch.setattr(tuning, "compiler_problem", lambda place: "")
    for x in data:
        engine.train_step(x)
    assert engine.step == 24
    assert not engine.tuner.trying
    record = engine.decisions.records["compile"]
    assert record.candidates.keys() == {"eager", "step"}
