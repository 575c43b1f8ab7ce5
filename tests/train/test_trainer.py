"""A run from its config: what it leaves behind, how it resumes, how it ends."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from lezero import checkpoint
from lezero.core.errors import ConfigError, CorruptError, FileError, NumericsError
from lezero.files import list_generations, read_generation, step_of
from lezero.train import Callback, RunConfig, Trainer, TrainResult
from lezero.train.metrics import read_metrics
from tests.train.runs import config, filled_cache, one_thread, settings

__all__ = ["filled_cache", "one_thread"]
pytestmark = pytest.mark.usefixtures("one_thread")


class Recorder(Callback):
    """Writes down every call, and does what it is told after a step."""

    def __init__(self, **after_step) -> None:
        self.calls: list[tuple] = []
        self.after_step = {int(name[2:]): do for name, do in after_step.items()}

    def on_start(self, trainer):
        self.calls.append(("start", trainer.engine.step))

    def on_step(self, trainer, result):
        self.calls.append(("step", result.step))
        if result.step in self.after_step:
            self.after_step[result.step](trainer)

    def on_validation(self, trainer, loss):
        self.calls.append(("validation", trainer.engine.step))

    def on_checkpoint(self, trainer, step):
        self.calls.append(("checkpoint", step))

    def on_event(self, trainer, text, level):
        self.calls.append(("event", level, text))

    def on_end(self, trainer):
        self.calls.append(("end",))

    def events(self):
        return [call[2] for call in self.calls if call[0] == "event"]

    def steps(self):
        return [call[1] for call in self.calls if call[0] == "step"]


def train(folder: Path, recorder: Recorder | None = None, **changes) -> tuple[TrainResult, Trainer]:
    trainer = Trainer(config(folder, **changes), [recorder] if recorder else [])
    return trainer.run(), trainer


def steps_in(folder: Path) -> list[int]:
    return [step_of(path) for path in list_generations(folder / "run" / "checkpoints")]


@pytest.fixture(scope="module")
def finished(one_thread, tmp_path_factory):
    """A whole run: its folder, result and recorder. Not to be changed."""
    folder, recorder = tmp_path_factory.mktemp("finished"), Recorder()
    result, _ = train(folder, recorder)
    return folder, result, recorder


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run that a test may damage or go on with."""
    shutil.copytree(finished[0], tmp_path / "copy")
    return tmp_path / "copy"


def test_the_loss_falls_and_the_result_says_how_it_ended(finished):
    folder, result, _ = finished
    metrics = read_metrics(folder / "run/metrics.jsonl")
    losses = metrics.column("loss")
    assert list(metrics.steps) == list(range(1, 21))
    assert losses[0] > 5
    assert losses[-1] < losses[0] - 1
    assert result == TrainResult(
        folder / "run", 20, losses[-1], metrics.column("validation_loss")[-1], 0
    )
    steps, validation = metrics.known("validation_loss")
    assert steps == [10, 20]
    assert validation[1] < validation[0]
    for name in ("lr", "grad_norm", "tokens", "tokens_per_s", "seconds", "memory_bytes"):
        assert all(value > 0 for value in metrics.column(name)), name
    assert set(metrics.column("tokens")) == {8 * 32}


def test_callbacks_are_called_in_the_documented_order(finished):
    def step(n, *more):
        return [("step", n), *((what, n) for what in more)]

    expected = [("start", 0)]
    for n in range(1, 21):
        expected += step(n, *["validation"] * (n % 10 == 0), *["checkpoint"] * (n % 5 == 0))
    assert finished[2].calls == [*expected, ("end",)]


def test_a_step_is_in_the_metrics_before_its_checkpoint_can_be(tmp_path, monkeypatch):
    real, seen = checkpoint.Saver.save, []

    def save(self, step, *parts):
        seen.append((step, read_metrics(tmp_path / "run/metrics.jsonl").steps[-1]))
        return real(self, step, *parts)

    monkeypatch.setattr(checkpoint.Saver, "save", save)
    train(tmp_path, train__steps=6)
    assert seen == [(5, 5), (6, 6)]


def test_generations_are_kept_as_configured_with_best_and_last(finished):
    folder = finished[0]
    assert steps_in(folder) == [10, 15, 20]
    root = folder / "run/checkpoints"
    assert checkpoint.read_mark(root, "best") == checkpoint.read_mark(root, "last") == 20
    assert set(read_generation(list_generations(root)[-1]).documents) >= {
        "state", "optimizer", "random", "decisions", "environment", "cursor", "progress", "config",
        "model",
    }  # fmt: skip


def test_every_file_of_a_run_is_there_and_sane(finished):
    run = finished[0] / "run"
    loaded = {path.name: json.loads(path.read_text()) for path in run.glob("*.json")}
    others = {"decisions.json", "forecast.json", "hardware.json", "sample.json"}
    assert loaded.keys() == {"data.json", *others}
    assert loaded["data.json"]["documents"] > 0
    topics = {d["topic"]: d for d in loaded["decisions.json"]["decisions"]}
    assert topics["precision"]["overridden"]
    assert topics["compile"]["chosen"] == "eager"
    forecast = loaded["forecast.json"]
    assert forecast["memory_bytes"] > 2**20
    assert forecast["step_seconds"] > 0
    assert forecast["fits"]
    assert loaded["hardware.json"]["ceilings"]["gemm_fp32"] == 1e11
    assert loaded["sample.json"][0]["prompt"] == "The "
    page = (run / "report.html").read_text()
    assert "Forecast against measured" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert (run / "tokenizer/tokenizer.json").is_file()


def test_the_config_of_a_run_is_a_config_again(finished):
    folder = finished[0]
    assert RunConfig.load(folder / "run/config.yaml") == config(folder)


def test_a_complete_run_says_so_and_trains_nothing(copied, finished):
    shutil.rmtree(copied / "run/tokenizer")
    before = (copied / "run/checkpoints/step-00000020/manifest.json").read_bytes()
    recorder = Recorder()
    data = {**settings(finished[0])["data"]}
    result, _ = train(copied, recorder, data=data)
    assert (result.step, result.exit_status) == (20, 0)
    assert (result.loss, result.validation_loss) == (
        finished[1].loss,
        finished[1].validation_loss,
    )
    assert recorder.steps() == []
    complete = "the run is complete: step 20 of 20; raise train.steps to go on"
    assert recorder.events() == ["resumed from step 20", complete]
    assert (copied / "run/checkpoints/step-00000020/manifest.json").read_bytes() == before
    assert (copied / "run/tokenizer/tokenizer.json").is_file()


def test_changes_of_the_config_are_told_and_count(copied):
    recorder = Recorder()
    result, trainer = train(
        copied, recorder, train__steps=22, train__weight_decay=0.01, train__lr=1e-3
    )
    assert recorder.steps() == [21, 22]
    assert "changed since the checkpoint: train.steps: 20 → 22" in recorder.events()
    assert "changed since the checkpoint: train.weight_decay: 0.1 → 0.01" in recorder.events()
    decays = {group["weight_decay"] for group in trainer.engine.optimizer.param_groups}
    assert decays == {0.0, 0.01}
    assert trainer.engine.optimizer.param_groups[0]["lr"] <= 1e-3
    assert result.step == 22
    told = [e["text"] for e in read_metrics(copied / "run/metrics.jsonl").happened("note")]
    assert any("train.steps" in text for text in told)
    resumes = read_metrics(copied / "run/metrics.jsonl").happened("resume")
    assert resumes[-1]["changed"] is True


def test_a_resumed_run_is_forecast_in_the_precision_it_goes_on_in(copied):
    for steps, asked, found in ((21, "auto", "fp32"), (22, "bf16", "bf16"), (23, "auto", "bf16")):
        _, trainer = train(copied, train__steps=steps, train__precision=asked)
        assert trainer.engine.precision.name == found
        assert json.loads((copied / "run/forecast.json").read_text())["precision"] == found


def test_other_data_or_another_model_is_refused(copied):
    (copied / "other.txt").write_text("something else entirely. " * 500)
    with pytest.raises(ConfigError, match=r"of the checkpoint .* and of this run"):
        train(copied, data__train=[str(copied / "other.txt")], train__steps=30)
    with pytest.raises(FileError, match="is of another model"):
        train(copied, model={"layers": 1, "dim": 32, "heads": 2}, train__steps=30)
    files = [copied / "run" / name for name in ("config.yaml", "forecast.json", "data.json")]
    before = [file.read_bytes() for file in files]
    told = r"another optimizer \(train.optimizer: adamw → adamw8bit\): name another run folder, or"
    with pytest.raises(FileError, match=told):
        train(copied, train__optimizer="adamw8bit", train__steps=30)
    assert [file.read_bytes() for file in files] == before


def test_without_resume_histories_do_not_mix(copied):
    """The old generations, of higher numbers, must neither be resumed nor crowd out the new."""
    fresh = {"every": 5, "keep": 2, "resume": False}
    best, root = [], copied / "run/checkpoints"
    recorder = Recorder(at1=lambda _: best.append(checkpoint.read_mark(root, "best")))
    _, trainer = train(copied, recorder, train__steps=7, checkpoint=fresh)
    assert best == [None], "a mark would later be that of a new generation"
    assert recorder.steps() == list(range(1, 8))
    assert steps_in(copied) == [5, 7]
    assert "moved aside: 3 checkpoints after step 0" in recorder.events()[0]
    assert len(list(trainer.folder.checkpoints.glob("superseded-step-*"))) == 2  # keep
    assert checkpoint.read_mark(trainer.folder.checkpoints, "last") == 7
    told = read_metrics(copied / "run/metrics.jsonl")
    assert told.steps == list(range(1, 8))
    assert [event["step"] for event in told.happened("checkpoint")] == [5, 7]
    train(copied, recorder := Recorder(), train__steps=9)
    assert recorder.steps() == [8, 9]


def test_a_restart_by_the_launcher_resumes_whatever_the_config_says(copied, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(copied, recorder := Recorder(), train__steps=21, checkpoint={"resume": False})
    assert recorder.steps() == [21]


def flip_a_bit(generation: Path) -> None:
    path = next(generation.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def test_a_damaged_generation_is_named_and_the_newest_good_one_used(copied):
    root = copied / "run/checkpoints"
    flip_a_bit(root / "step-00000020")
    _, trainer = train(copied, recorder := Recorder(), train__steps=17)
    assert recorder.steps() == [16, 17]
    assert trainer.loader.samples == 17 * 8, "no sample is left out, and none taken twice"
    assert "step-00000020 is damaged and was not used" in recorder.events()[1]
    assert "tensors-00000.safetensors" in recorder.events()[1]
    assert "tensor 'random/0/torch' is damaged" in recorder.events()[1]
    assert steps_in(copied) == [10, 15, 17]
    assert checkpoint.read_mark(root, "best") == 17, "the mark of the lost generation stayed"


def test_only_damaged_generations_are_an_error(copied):
    for path in list_generations(copied / "run/checkpoints"):
        flip_a_bit(path)
    with pytest.raises(CorruptError, match="no good generation among 3") as caught:
        train(copied, recorder := Recorder(), train__steps=30)
    for step in (10, 15, 20):
        assert f"step-000000{step}" in str(caught.value)
    assert recorder.calls == [("end",)]


def test_a_full_disk_costs_checkpoints_not_the_training(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    filler = disk / "filler"

    def fill(trainer):
        trainer.saver.wait()
        with open(filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    recorder = Recorder(at7=fill, at16=lambda trainer: filler.unlink())
    try:
        result, _ = train(tmp_path, recorder, run=str(disk / "run"), validation={"every": 0})
        assert result.step == 20
        assert result.exit_status == 0
        failed = [text for text in recorder.events() if "was not written" in text]
        assert len(failed) == 2
        assert failed[0].startswith("checkpoint of step 10 was not written, training goes on: ")
        assert "disk is full" in failed[0]
        loaded = [checkpoint.load(path).step for path in list_generations(disk / "run/checkpoints")]
        assert loaded == [5, 20], "earlier generations are intact, later ones complete"
        assert checkpoint.read_mark(disk / "run/checkpoints", "last") == 20
        again = Recorder(at22=fill)
        with pytest.raises(FileError, match=r"last checkpoint \(step 23\) could not be") as caught:
            train(tmp_path, again, run=str(disk / "run"), train__steps=23)
        assert ".." not in str(caught.value)
        assert again.calls[-1] == ("end",)
        (told,) = [text for text in again.events() if text.startswith("checkpoint")]
        assert told.startswith("checkpoint of step 23 was not written, trying once more: ")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_callback_that_raises_ends_the_run_cleanly(tmp_path):
    def explode(trainer):
        raise ZeroDivisionError("mine")

    recorder = Recorder(at7=explode)
    with pytest.raises(ZeroDivisionError, match="mine"):
        train(tmp_path, recorder)
    assert recorder.calls[-1] == ("end",)
    assert steps_in(tmp_path) == [5]
    assert (tmp_path / "run/report.html").is_file()
    result, _ = train(tmp_path, again := Recorder(), train__steps=8)
    assert again.steps() == [6, 7, 8]
    assert result.exit_status == 0


def test_a_run_that_stays_non_finite_ends_clearly_and_its_checkpoints_are_unharmed(
    tmp_path, caplog, capsys
):
    def poison(trainer):
        trainer.model.layers[1].mlp.gate_proj.weight.data[0, 0] = math.nan

    recorder = Recorder(at7=poison)
    with pytest.raises(NumericsError, match=r"layers\.1.*non-finite step 3 in a row"):
        train(tmp_path, recorder, train__max_skipped=3, validation={"every": 1, "batches": 1})
    assert recorder.calls[-1] == ("end",)
    metrics = read_metrics(tmp_path / "run/metrics.jsonl")
    assert sorted(metrics.skipped) == [8, 9]
    assert capsys.readouterr().out.count("step 8 skipped: ") == 1, "the view tells it"
    assert not [r for r in caplog.records if "is skipped" in r.getMessage()], "and nobody else"
    newest = checkpoint.load(tmp_path / "run")
    assert newest.step == 6, "the best one; a loss of NaN is never better"
    assert all(torch.isfinite(t).all() for t in newest.section("model").values())


def test_a_callback_may_stop_the_run(tmp_path):
    recorder = Recorder(at3=lambda trainer: trainer.engine.request_stop())
    result, _ = train(tmp_path, recorder)
    assert result.step in (3, 4)
    assert result.exit_status == 0, "nobody was killed"
    assert steps_in(tmp_path) == [result.step]


def test_tensorboard_gets_the_same_curves(tmp_path):
    train(tmp_path, train__steps=3, report={"tensorboard": True, "samples": []})
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = events.EventAccumulator(str(tmp_path / "run/tensorboard"))
    board.Reload()
    losses = [item.value for item in board.Scalars("loss/train")]
    assert losses == pytest.approx(
        list(read_metrics(tmp_path / "run/metrics.jsonl").column("loss"))
    )


def test_a_run_starts_from_a_hugging_face_folder(finished, tmp_path):
    from lezero.models import Transformer, TransformerConfig, save_hf

    run = finished[0] / "run"
    made = checkpoint.load(run)
    model = Transformer(TransformerConfig.parse(made.documents["model"], "model"))
    model.load_state_dict(made.section("model"))
    save_hf(model, tmp_path / "hf", run / "tokenizer")
    folder = str(tmp_path / "hf")
    _, trainer = train(
        tmp_path, model={"folder": folder}, data__tokenizer={"folder": folder}, train__steps=3
    )
    losses = read_metrics(tmp_path / "run/metrics.jsonl").column("loss")
    assert losses[0] < 4.6, "it goes on from trained weights"
    assert trainer.model.config.layers == 2


def test_prompts_and_responses_train_on_the_responses(tmp_path):
    lines = [
        {"prompt": f"What is {a} plus {b}? ", "response": f"{a + b}."}
        for a in range(12)
        for b in range(12)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    result, _ = train(tmp_path, data__train=[str(path)], train__steps=15)
    metrics = read_metrics(tmp_path / "run/metrics.jsonl")
    assert max(metrics.column("tokens")) < 8 * 32 / 2, "prompts carry no loss"
    assert result.loss < metrics.column("loss")[0]


def test_a_run_is_repeatable(finished, tmp_path):
    """The same config gives the same weights."""
    train(tmp_path, data=settings(finished[0])["data"])
    a, b = (checkpoint.load(folder / "run").section("model") for folder in (finished[0], tmp_path))
    assert all(torch.equal(a[name], b[name]) for name in a)
