"""`lz train` and `lz launch … lz train`: the main job from the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lezero import checkpoint
from lezero.cli.main import main
from lezero.train.metrics import read_metrics
from tests.train.runs import filled_cache, one_thread, write_config

__all__ = ["filled_cache", "one_thread"]
pytestmark = pytest.mark.usefixtures("one_thread")


def test_train_shows_and_keeps_what_it_did_and_goes_on(tmp_path, capsys):
    path = str(write_config(tmp_path))
    assert main(["train", path, "--set", "train.steps=6", "--set", "train.lr=0.002"]) == 0
    out, err = capsys.readouterr()
    assert "step 6/6  loss " in out
    assert f"report: {tmp_path / 'run/report.html'}" in out
    assert err == ""
    metrics = read_metrics(tmp_path / "run/metrics.jsonl")
    assert list(metrics.steps) == list(range(1, 7))
    assert max(metrics.column("lr")) <= 0.002
    assert main(["train", path, "--set", "train.steps=8"]) == 0
    out, _ = capsys.readouterr()
    assert "goes on from step 6" in out
    assert "changed since the checkpoint: train.lr: 0.002 → 0.003" in out
    assert list(read_metrics(tmp_path / "run/metrics.jsonl").steps) == list(range(1, 9))
    assert main(["train", path, "--set", "train.steps=8"]) == 0
    assert "the run is complete: step 8 of 8; raise train.steps" in capsys.readouterr().out


def test_two_ranks_train_what_one_does_and_one_goes_on_alone(tmp_path, capsys, caplog):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    one = write_config(tmp_path / "one", train__steps=6)
    two = write_config(tmp_path / "two", train__steps=6)
    assert main(["train", str(one)]) == 0
    command = [sys.executable, "-m", "lezero", "launch", "-n", "2", "-m", "lezero", "train", two]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout
    assert done.stdout.count("report: ") == 1, "rank 0 alone speaks"
    losses = [
        read_metrics(tmp_path / n / "run/metrics.jsonl").column("loss") for n in ("one", "two")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    saved = checkpoint.load(tmp_path / "two/run")
    assert saved.documents["environment"]["world_size"] == 2
    capsys.readouterr()
    assert main(["train", str(two), "--set", "train.steps=7"]) == 0
    assert "goes on from step 6" in capsys.readouterr().out
    assert "number of ranks: 2 when saved, 1 now" in caplog.text
