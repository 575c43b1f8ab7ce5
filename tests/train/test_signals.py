"""Signals: SIGTERM, Ctrl-C and a closed terminal save a last generation, alone and launched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lezero import checkpoint
from lezero.elastic.launcher import _forwarding
from lezero.files import list_generations, step_of
from lezero.train import Trainer
from lezero.train.metrics import read_metrics
from lezero.train.signals import graceful_stop
from tests.train.runs import config, filled_cache, one_thread, write_config

__all__ = ["filled_cache", "one_thread"]
pytestmark = pytest.mark.usefixtures("one_thread")


def steps_in(folder: Path) -> list[int]:
    return [step_of(path) for path in list_generations(folder / "run" / "checkpoints")]


def start_lz(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lezero", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.usefixtures("not_under_nohup")
def test_sigterm_ctrl_c_and_a_closed_terminal_save_and_a_later_start_resumes(tmp_path):
    started = []
    for launcher, number in (
        ((), signal.SIGTERM),
        ((), signal.SIGINT),
        ((), signal.SIGHUP),
        (("launch", "-n", 2, "--oversubscribe", "-m", "lezero"), signal.SIGTERM),
    ):
        folder = tmp_path / str(len(started))
        folder.mkdir()
        many = write_config(
            folder, train__steps=100_000, checkpoint={"every": 0}, validation={"every": 0}
        )
        started.append((folder, number, start_lz(*launcher, "train", many)))
    deadline = time.monotonic() + 180
    waiting = list(started)
    while waiting:  # whoever has begun is stopped at once: it would train on beside the others
        assert time.monotonic() < deadline
        time.sleep(0.05)
        for folder, number, process in list(waiting):
            assert process.poll() is None, process.communicate()
            metrics = folder / "run/metrics.jsonl"
            if metrics.exists() and metrics.read_text().count("\n") > 3:
                process.send_signal(number)
                waiting.remove((folder, number, process))
    for folder, number, process in started:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 128 + number, err
        assert f"{signal.Signals(number).name}: the run ends" in err
        assert "Traceback" not in err
        assert "asked to stop: saving step" in out
        (step,) = steps_in(folder)
        assert step == read_metrics(folder / "run/metrics.jsonl").steps[-1]
        assert checkpoint.read_mark(folder / "run/checkpoints", "last") == step
    folder = started[0][0]
    step = steps_in(folder)[0]
    assert Trainer(config(folder, train__steps=step + 2)).run().step == step + 2
    resumed = read_metrics(folder / "run/metrics.jsonl").happened("resume")
    assert [event["step"] for event in resumed] == [step]


def test_under_nohup_a_closed_terminal_ends_nothing():
    asked = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with graceful_stop(lambda: asked.append(1)) as request, _forwarding(None):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not asked
    assert request.signal is None


def test_a_second_ctrl_c_ends_at_once_and_leaves_the_handlers_of_before():
    asked = []
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(number) for number in numbers]
    with graceful_stop(lambda: asked.append(1)) as request:
        signal.raise_signal(signal.SIGINT)
        assert (asked, request.exit_status) == ([1], 130)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in numbers] == before
