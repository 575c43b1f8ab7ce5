"""What a person should see reaches callbacks too: an alert need not read the log."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lezero.train import Callback, Trainer
from lezero.train.metrics import read_metrics
from tests.train.runs import config, filled_cache, one_thread

__all__ = ["filled_cache", "one_thread"]
pytestmark = pytest.mark.usefixtures("one_thread")


class Alerts(Callback):
    """Keeps every event, and makes the weights non-finite for step 2 alone."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def on_step(self, trainer, result):
        weight = trainer.model.layers[1].mlp.gate_proj.weight.data
        if result.step == 1:
            self.value = weight[0, 0].item()
            weight[0, 0] = math.nan
        elif result.step == 2:
            weight[0, 0] = self.value

    def on_event(self, trainer, text, level):
        self.told.append((level, text))


def run(folder: Path, steps: int) -> Alerts:
    alerts = Alerts()
    Trainer(config(folder, train__steps=steps, validation={"every": 0}), [alerts]).run()
    return alerts


def test_a_skipped_step_and_a_resume_are_events_that_the_log_writes_once(tmp_path, capsys):
    ((level, text),) = run(tmp_path, 3).told
    assert level == "warning"
    assert text.startswith("step 2 skipped: ")
    assert "layers.1" in text
    assert capsys.readouterr().out.count("step 2 skipped: ") == 1
    assert run(tmp_path, 4).told[0] == ("info", "resumed from step 3")
    out = capsys.readouterr().out
    assert out.count("goes on from step 3") == 1
    assert "resumed from" not in out
    metrics = read_metrics(tmp_path / "run/metrics.jsonl")
    assert sorted(metrics.skipped) == [2]
    assert len(metrics.happened("skipped")) == len(metrics.happened("resume")) == 1
    assert not any("resumed" in event["text"] for event in metrics.happened("note"))
