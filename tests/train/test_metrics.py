import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys

import pytest

from lezero.core.errors import FileError, MissingExtraError
from lezero.train import metrics as metrics_module
from lezero.train.metrics import MetricsWriter, StepRecord, TensorBoardSink, read_metrics


def record(step, loss=2.0, **more):
    return StepRecord(step, 100, loss, **more)


def test_every_line_is_strict_json_and_comes_back(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.step(record(1, 2.5, lr=1e-3, tokens=64, memory_bytes=7))
        writer.step(record(2, math.nan, grad_norm=math.inf, skipped="the loss is nan"))
        writer.event("checkpoint", step=2, text="saved", odd={"deep": math.nan})
        writer.step(record(3, 2.4, validation_loss=2.6))
    assert writer.error is None

    def refuse(name):
        raise AssertionError(name)

    lines = [json.loads(x, parse_constant=refuse) for x in path.read_text().splitlines()]
    assert lines[0].keys() == {
        "step",
        "total_steps",
        "loss",
        "lr",
        "tokens",
        "memory_bytes",
        "time",
    }
    assert lines[1]["loss"] is None
    assert lines[1]["nonfinite"] == {"loss": "nan", "grad_norm": "inf"}
    found = read_metrics(path)
    assert found.steps == [1, 2, 3]
    assert found.column("loss")[0] == 2.5
    assert math.isnan(found.column("loss")[1])
    assert found.column("grad_norm")[1] == math.inf
    assert found.known("validation_loss") == ([3], [2.6])
    assert found.known("never") == ([], [])
    assert found.skipped == {2: "the loss is nan"}
    assert found.happened("checkpoint")[0]["text"] == "saved"
    assert (found.torn, len(found)) == (0, 3)


@pytest.mark.parametrize("cut", range(1, 40, 7))
def test_a_torn_last_line_costs_itself_only(tmp_path, cut):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.step(record(1))
        writer.step(record(2))
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_metrics(path).steps == [1]
    assert read_metrics(path).torn == 1
    with MetricsWriter(path) as writer:
        writer.step(record(2, 1.5))
    found = read_metrics(path)
    assert found.steps == [1, 2]
    assert found.column("loss")[1] == 1.5
    assert found.torn == (cut > 1)


def test_after_a_resume_the_repeated_steps_count_once(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(1, 16):
            writer.step(record(step, 9.0, skipped="x" if step == 12 else None))
    with MetricsWriter(path) as writer:
        writer.event("resume", step=10)
        writer.step(record(11, 1.0))
    found = read_metrics(path)
    assert found.steps == list(range(1, 12))
    assert list(found.column("loss")) == [9.0] * 10 + [1.0]
    assert not found.skipped
    assert len(found.happened("resume")) == 1
    with pytest.raises(ValueError, match="needs the step"):
        MetricsWriter.event(writer, "resume")


@pytest.mark.parametrize(("start", "left"), [("begin", 0), ("resume", 10)])
def test_what_happened_in_a_history_that_was_left_is_void(tmp_path, start, left):
    path = tmp_path / "m.jsonl"
    kinds = ("checkpoint", "validation", "skipped", "resume")
    with MetricsWriter(path) as writer:
        assert not writer.goes_on
        writer.event("note", step=20, text="stays")
        for step in (10, 20):
            writer.step(record(step, 9.0))
            for kind in kinds:
                writer.event(kind, step=step)
    with MetricsWriter(path) as writer:
        assert writer.goes_on
        writer.event(start, step=left or None)
        writer.step(record(11, 1.0))
    found = read_metrics(path)
    assert found.steps == ([10, 11] if left else [11])
    for kind in kinds[:3]:
        assert [event["step"] for event in found.happened(kind)] == ([10] if left else [])
    assert [event["step"] for event in found.happened("resume")] == ([10, 20, 10] if left else [])
    assert len(found.happened("note")) == 1


def test_a_run_that_starts_again_without_a_word_replaces_what_it_repeats(tmp_path):
    path = tmp_path / "m.jsonl"
    for loss, steps in ((9.0, 20), (1.0, 5)):
        with MetricsWriter(path) as writer:
            for step in range(1, steps + 1):
                writer.step(record(step, loss, lr=loss if step > 2 else None))
    found = read_metrics(path)
    assert found.steps == [1, 2, 3, 4, 5]
    assert set(found.column("loss")) == {1.0}
    assert found.known("lr") == ([3, 4, 5], [1.0] * 3)


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    code = (
        "import sys; from lezero.train.metrics import *\n"
        "w = MetricsWriter(sys.argv[1]); i = 0\n"
        "while True:\n"
        "    i += 1; w.step(StepRecord(i, 10**9, 1.0))\n"
        "    if i == 200: print('go', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    found = read_metrics(path)
    assert len(found) >= 200
    assert found.steps == list(range(1, len(found) + 1))


def test_lines_that_are_no_metrics_are_counted_not_believed(tmp_path):
    path = tmp_path / "m.jsonl"
    bad = ["[]", "3", "{}", '{"step":"x"}', '{"step":true}', '{"event":3}', "\x00", "[" * 5000]
    bad.append('{"event":"a","step":"x"}')
    good = ['{"step":1,"loss":1' + "0" * 400 + "}", "", '{"step":2,"memory":5}']
    path.write_text("\n".join(bad + good) + "\n")
    found = read_metrics(path)
    assert found.steps == [1, 2]
    assert found.column("loss")[0] == math.inf
    assert found.column("memory_bytes")[1] == 5
    assert found.torn == 9
    path.write_text(json.dumps({"step": 1} | {f"k{i}": i for i in range(500)}) + "\n")
    assert len(read_metrics(path).columns) <= 64


def test_missing_and_unwritable_files_are_named(tmp_path):
    with pytest.raises(FileError, match="nothere"):
        read_metrics(tmp_path / "nothere")
    with pytest.raises(FileError, match="cannot be written"):
        MetricsWriter(tmp_path / "no" / "m.jsonl")


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path, monkeypatch, caplog):
    path = tmp_path / "m.jsonl"
    real_write = os.write

    def full(file, data):
        if b'"step":2' in data:
            raise OSError(errno.ENOSPC, "No space left on device")
        if b'"step":3' in data:
            return real_write(file, data[:10])
        return real_write(file, data)

    with caplog.at_level(logging.WARNING), MetricsWriter(path) as writer:
        monkeypatch.setattr(metrics_module.os, "write", full)
        for step in range(1, 6):
            writer.step(record(step))
        monkeypatch.undo()
    assert writer.error.errno == errno.ENOSPC
    assert caplog.text.count("No space left") <= 1
    assert read_metrics(path).steps == [1, 4, 5]


def test_a_long_run_reads_in_columns(tmp_path):
    path = tmp_path / "m.jsonl"
    with open(path, "w") as file:
        for step in range(1, 20_001):
            file.write(f'{{"step":{step},"loss":{1 / step}}}\n')
    found = read_metrics(path)
    assert len(found) == 20_000
    assert found.column("loss")[-1] == 1 / 20_000


def test_a_pipe_is_no_file_of_metrics(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(FileError, match=r"metrics\.jsonl: not a regular file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_tensorboard_needs_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"lezero\[tensorboard\]"):
        TensorBoardSink(tmp_path)


def test_tensorboard_gets_the_figures(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.step(record(1, 2.5, lr=1e-3, validation_loss=2.75))
    sink.event("saved", 1)
    sink.close()
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert [s.value for s in board.Scalars("loss/train")] == [2.5]
    assert [s.value for s in board.Scalars("loss/validation")] == [2.75]
    assert "step/gradient norm" not in board.Tags()["scalars"]


def test_tensorboard_shows_a_run_that_starts_over_once(tmp_path):
    """A process that was killed before its first checkpoint has left steps behind."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for loss in (2.5, 3.5):
        sink = TensorBoardSink(tmp_path)
        for step in (1, 2):
            sink.step(record(step, loss))
        sink.close()
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert [(s.step, s.value) for s in board.Scalars("loss/train")] == [(1, 3.5), (2, 3.5)]


def test_a_full_disk_ends_tensorboards_events_and_nothing_else(tmp_path, caplog):
    pytest.importorskip("tensorboard")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sink = TensorBoardSink(tmp_path)
    sink.step(record(1, 2.5))
    writer = sink._writer
    writer.add_scalar = full  # as it raises what its thread met
    with caplog.at_level("WARNING", logger="lezero.metrics"):
        sink.step(record(2, 2.5))
        sink.step(record(3, 2.5))
        sink.close()
    assert [r.getMessage() for r in caplog.records] == [
        "TensorBoard's events are written no more: No space left on device"
    ]
    writer.close()
