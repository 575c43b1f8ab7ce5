"""A resume is bitwise: runs that are really killed, and the states that an engine carries."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lezero import checkpoint
from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError, FileError, LeZeroError
from lezero.optim import AdamW, Schedule
from lezero.train import RunConfig, Trainer
from lezero.train.engine import Engine
from lezero.train.loss import next_token_loss
from tests.nn.versions import Scaled
from tests.ranks import RankError, RankPool
from tests.train.runs import filled_cache, one_thread

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from checkpoint_parts.resume import QUICK, differences
from checkpoint_parts.resume_worker import Killer

__all__ = ["filled_cache", "one_thread"]
VOCAB = 13


def rank_trains(path, kill_at):
    assert Trainer(RunConfig.load(path), [Killer(kill_at)]).run().exit_status == 0


@pytest.mark.parametrize("case", [QUICK[1]], ids=str)
def test_a_killed_run_ends_bit_for_bit_as_one_that_was_not(
    case, ranks, one_thread, tmp_path, capfd
):
    """The one that was not is trained by ranks that are already warm, the other is launched."""

    def whole(case, path, kill_at):
        ranks(case.ranks, rank_trains, path, kill_at, timeout_s=180)

    assert differences(case, tmp_path, whole) == []
    err = capfd.readouterr().err
    assert f"rank {case.ranks - 1} was killed by SIGKILL" in err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def other_ranks(one_thread):
    """A second pool, since two runs of a pair go on side by side."""
    with RankPool() as pool:
        yield pool


@pytest.mark.parametrize("case", [QUICK[0], QUICK[2]], ids=str)
def test_a_killed_run_goes_on_bit_for_bit_in_ranks_that_are_warm(
    case, ranks, other_ranks, one_thread, tmp_path
):
    """They are really killed, and started again as the launcher does it: with a restart counted."""

    def whole(case, path, kill_at):
        ranks(case.ranks, rank_trains, path, kill_at, timeout_s=180)

    def killed(case, path, kill_at):
        with pytest.raises(RankError, match=f"rank {case.ranks - 1} was killed by SIGKILL"):
            other_ranks(case.ranks, rank_trains, path, kill_at, timeout_s=180)
        again = {"TORCHELASTIC_RESTART_COUNT": "1"}
        other_ranks(case.ranks, rank_trains, path, kill_at, timeout_s=180, env=again)

    assert differences(case, tmp_path, whole, killed) == []


class Model(nn.Module):
    """With dropout, and a buffer that counts in training."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.layer = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.BatchNorm1d(16))

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]))


def make(**options):
    torch.manual_seed(0)
    model = Model()
    options = {
        "precision": "fp32", "accumulate": 2, "clip": 0.5, "schedule": Schedule(warmup=3),
        "total_steps": 12, "compile": "off", "loss": next_token_loss, **options,
    }  # fmt: skip
    return Engine(model, AdamW(model, lr=1e-2), **options)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        tokens, targets = torch.randint(0, VOCAB, (2, 6, 5), generator=generator)
        targets[0, :4] = -100
        yield {"tokens": tokens, "targets": targets}


def carry_on(engine, data, change=None):
    """Figures of the steps of `data`; `change` is a step and the precision from there on."""
    told = []
    for batch in data:
        if change and engine.step == change[0]:
            engine.set_precision(change[1])
        r = engine.train_step(batch)
        told.append((r.step, r.loss, r.grad_norm, r.lr, r.tokens, r.skipped, engine.precision.name))
    return told


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({}, None),
        ({"precision": "bf16", "accumulate": 3}, None),
        ({"precision": "fp16"}, None),
        ({"precision": "auto"}, None),
        ({"precision": "fp32"}, (4, "bf16")),
        ({"precision": "bf16"}, (5, "fp16")),
        ({"precision": "auto"}, (4, "fp32")),
    ],
    ids=["dropout", "bf16", "fp16", "auto", "to-bf16", "to-fp16", "auto-to-fp32"],
)
def test_an_engine_goes_on_bit_for_bit(options, change, tmp_path):
    data = list(batches(12))
    whole, first = make(**options), make(**options)
    told = carry_on(whole, data, change)
    carry_on(first, data[:7], change)
    path = first.save(tmp_path)
    second = make(**options)
    documents = second.load(path)
    assert documents["state"]["step"] == 7
    assert carry_on(second, data[7:], change) == told[7:]
    for (name, a), b in zip(
        whole.model.state_dict().items(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        mine, other = whole.optimizer.state[a], second.optimizer.state[b]
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], other[key]) for key in mine)


def test_the_loss_scale_and_its_growth_are_carried_on(tmp_path):
    def grown():
        engine = make(precision="fp16")
        engine.precision.scaler.set_growth_interval(5)
        return engine

    data = list(batches(12))
    whole, first, second = grown(), grown(), grown()
    carry_on(whole, data)
    carry_on(first, data[:8])
    second.load(first.save(tmp_path))
    assert second.precision.scale == 2.0**17, "once grown, three steps on the way to the next"
    carry_on(second, data[8:])
    assert second.precision.state() == whole.precision.state()
    assert second.precision.scale == 2.0**18


def test_a_precision_that_the_user_asks_for_now_wins_over_the_checkpoint(tmp_path):
    first = make(precision="bf16")
    carry_on(first, batches(2))
    path = first.save(tmp_path)
    second = make(precision="fp32")
    second.load(path)
    assert second.precision.name == "fp32"
    third = make(precision="auto")
    third.load(path)
    assert third.precision.name == "bf16"


def test_skips_in_a_row_and_decisions_are_carried_on(tmp_path):
    first = make()
    first.decisions.record("something", "a", reason="measured")
    carry_on(first, batches(1))
    first.skipped_in_a_row = 3
    second = make(decisions=Decisions())
    second.load(first.save(tmp_path))
    assert second.skipped_in_a_row == 3
    assert second.decisions.record("something", "b") == "a"


def test_the_callers_generators_are_carried_on(tmp_path):
    torch.manual_seed(7)
    first = make()
    path = first.save(tmp_path)
    expected = torch.rand(4)
    torch.manual_seed(99)
    make().load(path)
    assert torch.equal(torch.rand(4), expected)


def test_documents_of_the_caller_come_back_and_never_replace_the_engines_own(tmp_path):
    engine = make()
    engine.save(tmp_path, loader={"cursor": 3})
    assert make().load(tmp_path)["loader"] == {"cursor": 3}
    for name in ("state", "optimizer", "random", "feedback", "decisions", "environment"):
        with pytest.raises(ConfigError, match=f"^documents: .* '{name}' of its own"):
            engine.save(tmp_path / "other", **{name: {"cursor": 3}})
    assert not (tmp_path / "other").exists()


def test_a_save_of_a_new_run_stays_beside_later_steps_of_an_earlier_one(tmp_path):
    earlier, data = make(), list(batches(4))
    for batch in data:
        earlier.train_step(batch)
        earlier.save(tmp_path)
    anew = make()
    anew.train_step(data[0])
    assert anew.save(tmp_path).is_dir()
    again = make()
    again.load(tmp_path)
    assert again.step == 1


def test_a_generation_that_no_engine_wrote_is_refused(tmp_path):
    with checkpoint.Saver(tmp_path) as saver:
        saver.save(7, {"model/w": torch.ones(2)}, {"state": {"step": 7}})
    engine = make()
    with pytest.raises(FileError, match=r"not written by an Engine: .* document 'optimizer'"):
        engine.load(tmp_path)
    assert engine.step == 0


class Distilled(nn.Module):
    """Whose teacher no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = nn.Linear(2, 2), nn.Linear(2, 1)
        self.register_state_dict_post_hook(self._leave_out)
        self.register_load_state_dict_post_hook(lambda m, keys: keys.missing_keys.clear())

    @staticmethod
    def _leave_out(_model, state, *_):
        del state["teacher.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_that_the_model_leaves_out_stay(dtype, tmp_path):
    model = Distilled().to(dtype)
    engine = Engine(model, AdamW(model.student.parameters()), precision="fp32")
    engine.step = 3
    engine.save(tmp_path)
    with torch.no_grad():
        model.teacher.weight.fill_(7)
    engine.step = 0
    engine.load(tmp_path)
    assert engine.step == 3
    assert model.teacher.weight.tolist() == [[7, 7], [7, 7]]


class Keeping(nn.Linear):
    """A linear layer with a state of its own."""

    def __init__(self, kept=None):
        super().__init__(2, 1)
        self.kept = kept

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


def linear(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"precision": "fp32", "compile": "off", "loss": lambda model, x: model(x).mean()}
    return Engine(model, optimizer, **options)


def test_the_extra_state_of_modules_is_saved_where_it_is_plain(tmp_path):
    for kept in ({"seen": [3, "x"]}, torch.ones(3)):
        linear(nn.Sequential(Keeping(kept))).save(tmp_path)
        other = nn.Sequential(Keeping())
        linear(other).load(tmp_path)
        assert str(other[0].kept) == str(kept)
    with pytest.raises(FileError, match=r"extra_state.0._extra_state: object cannot be written"):
        linear(nn.Sequential(Keeping(object()))).save(tmp_path / "other")
    with pytest.raises(FileError, match=r"of another model: it has 0._extra_state"):
        linear(nn.Sequential(nn.Linear(2, 1))).load(tmp_path)


def test_modules_are_told_their_own_version(tmp_path):
    def engine(factor):
        model = nn.Sequential(nn.Linear(4, 4), Scaled(factor, older=False))
        return Engine(model, AdamW(model, lr=1e-2), precision="fp32")

    engine(5.0).save(tmp_path)
    other = engine(3.0)
    other.load(tmp_path)
    assert other.model[1].factor.item() == 5


def test_extra_state_that_grows_is_no_other_model(tmp_path, caplog):
    for kept in (torch.ones(0), torch.ones(3), {"seen": 3}):
        engine = linear(nn.Sequential(Keeping(kept)))
        engine.save(tmp_path)
        new = nn.Sequential(Keeping(torch.ones(0)))
        linear(new).load(tmp_path)
        assert str(new[0].kept) == str(kept)
    assert not caplog.records
    assert not list(tmp_path.glob("superseded-*"))


def test_a_save_beside_another_model_loses_neither(tmp_path, caplog):
    """Two engines in one folder, as of a generator and a discriminator."""
    one, other = linear(nn.Linear(2, 1)), linear(nn.Linear(2, 3))
    path = one.save(tmp_path)
    assert one.save(tmp_path) == path
    assert not caplog.records
    assert other.save(tmp_path) == path
    assert "was of another model; give each engine a folder of its own" in caplog.text
    (aside,) = tmp_path.glob("superseded-step-00000000-*")
    with pytest.raises(
        FileError, match=r"is of another model: bias is .* weight is \(3, 2\) there"
    ):
        one.load(tmp_path)
    one.load(aside)
    other.load(tmp_path)


def test_the_state_of_a_scheduler_that_holds_infinities_goes_along(tmp_path):
    engine = linear(nn.Linear(2, 1))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=1)
    engine.save(tmp_path, scheduler=scheduler.state_dict())
    other = linear(nn.Linear(2, 1))
    again = torch.optim.lr_scheduler.ReduceLROnPlateau(other.optimizer, patience=5)
    again.load_state_dict(other.load(tmp_path)["scheduler"])
    assert again.state_dict() == scheduler.state_dict()
    assert again.best == float("inf")
    itself = {}
    itself["itself"] = itself
    with pytest.raises(FileError, match="nested more than 64 deep"):
        engine.save(tmp_path, itself=itself)


def full(*_):
    raise OSError(errno.ENOSPC, "no space")


def test_a_failed_save_leaves_another_model_in_its_place(tmp_path, monkeypatch, caplog):
    one, other = linear(nn.Linear(2, 1)), linear(nn.Linear(2, 3))
    one.save(tmp_path)
    with pytest.raises(FileError, match="documents"):
        other.save(tmp_path, note=object())
    with monkeypatch.context() as patch:
        patch.setattr("lezero.checkpoint.crew.commit_parts", full)
        with pytest.raises(LeZeroError, match="the disk is full"):
            other.save(tmp_path)
    assert "another model" not in caplog.text
    assert not list(tmp_path.glob("superseded-*"))
    one.load(tmp_path)


def test_a_generation_that_cannot_be_read_is_moved_aside(tmp_path, monkeypatch, caplog):
    engine = linear(nn.Linear(2, 1))
    path = engine.save(tmp_path)

    def refused(path, **_):
        raise FileError(f"{path}: cannot be opened (Input/output error)")

    monkeypatch.setattr("lezero.train.engine_state.read_generation", refused)
    engine.save(tmp_path)
    assert "was there, but could not be read" in caplog.text
    assert "another model" not in caplog.text
    (aside,) = tmp_path.glob("superseded-step-00000000-*")
    engine.load(path)
    engine.load(aside)


def test_a_folder_whose_name_is_too_long_is_told(tmp_path):
    with pytest.raises(LeZeroError, match=r"was not written: .*too long"):
        linear(nn.Linear(2, 1)).save(tmp_path / ("x" * 300))
