import io
import math
import re
import threading
import time

import pytest
from rich.console import Console

from lezero.train.live import LiveView, RunInfo, _State
from lezero.train.metrics import StepRecord

INFO = RunInfo("runs/a", 1000, model="26M", precision="bf16", ranks=2, forecast_bytes=2 * 2**30)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def record(step, loss=2.0312, **more):
    given = {"lr": 3e-4, "grad_norm": 0.82, "tokens": 2048, "tokens_per_s": 12345.0,
             "seconds": 0.5, "memory_bytes": 2**30, "share_of_ceiling": 0.412}  # fmt: skip
    return StepRecord(step, 1000, loss, **given | more)


def terminal(width=100):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=30, color_system=None)
    out.reconfigure = None
    return out, console


def plain_view(clock, **more):
    out = io.StringIO()
    return out, LiveView(Console(file=out, width=60, soft_wrap=True), clock=clock, **more)


def shown(view, width=100):
    return "\n".join("".join(text for text, _ in line) for line in view._state.picture(width))


def test_the_terminal_shows_every_figure():
    _, console = terminal()
    clock = Clock()
    view = LiveView(console, clock=clock)
    assert view.fixed
    view.start(INFO)
    for step in range(1, 413):
        clock.now += 0.5
        view.step(record(step, 2.0312 + 1 / step))
    view.step(record(413, math.nan, skipped="the loss is nan"))
    clock.now += 0.5
    view.step(record(414, 2.25, validation_loss=2.114))
    said = shown(view)
    view.stop()
    for text in ("runs/a · 26M · bf16 · 2 ranks", "step 414/1,000", "41%", "2.250", "▁",
                 "validation 2.114", "12,345 tokens/s", "41% of the measured ceiling", "1.00 GiB",
                 "50% of 2.00 GiB forecast", "lr 3e-4", "gradient norm 0.820", "skipped 1",
                 "4m 53s left"):  # fmt: skip
        assert text in said


@pytest.mark.parametrize("width", [1, 8, 20, 44, 79, 300])
def test_lines_never_wrap(width):
    out, console = terminal(width)
    view = LiveView(console)
    view.start(INFO)
    view.step(record(7, validation_loss=2.5))
    view.stop()
    for line in re.split(r"\r|\n", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())):
        assert len(line) <= width


def test_messages_and_prints_scroll_by_above(capsys):
    out, console = terminal()
    view = LiveView(console)
    view.start(INFO)
    view.step(record(1))
    view.event("checkpoint saved", "good")
    print("printed by somebody")
    view.event("odd \x1b[31m", "warning")
    view.stop("finished")
    said = out.getvalue()
    for text in ("✓ checkpoint saved", "printed by somebody", "! odd \ufffd[31m", "✓ finished"):
        assert text in said
    assert said.endswith("finished\n")
    print("after")
    assert "after" not in out.getvalue()
    assert "after" in capsys.readouterr().out


def test_at_most_four_drawings_a_second_and_no_thread():
    out, console = terminal()
    clock = Clock()
    view = LiveView(console, clock=clock)
    threads = threading.active_count()
    view.start(INFO)
    before = out.getvalue().count("runs/a")
    for step in range(1, 101):
        clock.now += 0.02
        view.step(record(step))
    assert threading.active_count() == threads
    assert out.getvalue().count("runs/a") - before <= 9
    view.stop()


def test_plain_lines_are_rare_and_whole():
    clock = Clock()
    out, view = plain_view(clock, plain_seconds=10)
    assert not view.fixed
    view.start(INFO)
    for step in range(1, 101):
        clock.now += 0.5
        view.step(record(step, validation_loss=2.5 if step == 33 else None,
                         skipped="the loss is nan" if step == 50 else None))  # fmt: skip
    view.event("checkpoint saved at step 100", "good")
    view.event("careful", "warning")
    view.stop("finished")
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert lines[0] == "runs/a · 26M · bf16 · 2 ranks"
    assert lines[1].startswith("step 1/1,000  loss 2.031  lr 3e-4  norm 0.820  12,345 tokens/s")
    assert "memory 1.00 GiB of 2.00 GiB forecast" in lines[1]
    assert sum(line.startswith("step ") for line in lines) <= 8
    assert any("step 33/" in line and "validation 2.500" in line for line in lines)
    assert "warning: step 50 skipped: the loss is nan" in lines
    assert lines[-3:] == ["checkpoint saved at step 100", "warning: careful", "finished"]


def test_the_last_step_is_said_when_a_run_stops_early():
    clock = Clock()
    out, view = plain_view(clock)
    view.start(INFO)
    for step in (1, 2, 3):
        view.step(record(step))
    view.stop()
    assert out.getvalue().splitlines()[-1].startswith("step 3/1,000")
    view.stop()
    view.step(record(4))
    assert "step 4" not in out.getvalue()


def test_one_slow_step_does_not_move_the_time_left():
    clock = Clock()
    _, view = plain_view(clock)
    view.start(INFO)
    for step in range(1, 51):
        clock.now += 300.0 if step == 25 else 0.5
        view.step(record(step))
    assert view._state.left_seconds() == pytest.approx(0.5 * 950)


def test_the_forecast_is_told_before_the_first_step():
    told = "forecast: memory 2.00 GiB a rank, 0.50 s a step"
    info = RunInfo("a", 10, ranks=2, forecast_bytes=2 << 30, forecast_seconds=0.5)
    out, view = plain_view(Clock())
    view.start(info)
    assert told in out.getvalue()
    assert told in str(_State(info, Clock()).picture(80))


@pytest.mark.parametrize("fixed", [True, False])
def test_a_resumed_run_says_where_it_goes_on(fixed):
    out = io.StringIO()
    view = LiveView(Console(file=out, force_terminal=fixed, width=80, color_system=None))
    view.start(RunInfo("a", 10, first_step=5))
    view.step(record(6))
    view.stop()
    assert out.getvalue().count("goes on from step 5") == 1
    assert "step 6/" in out.getvalue()


class Broken(io.StringIO):
    broken = False

    def write(self, text):
        if self.broken:
            raise BrokenPipeError
        return super().write(text)


@pytest.mark.parametrize("fixed", [True, False])
def test_output_that_goes_away_never_ends_a_training(fixed, monkeypatch):
    monkeypatch.setattr(
        Console, "on_broken_pipe", lambda self: (_ for _ in ()).throw(SystemExit(1))
    )
    out = Broken()
    view = LiveView(Console(file=out, force_terminal=fixed, width=80, height=20), plain_seconds=0)
    view.start(INFO)
    out.broken = True
    for step in range(1, 4):
        view.step(record(step, skipped="x"))
    view.event("hello")
    view.stop("done")


def test_text_that_the_stream_cannot_encode_is_replaced():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    view = LiveView(Console(file=stream, force_terminal=True, width=80))
    assert not view.fixed
    view.start(INFO)
    view.step(record(1))
    view.stop()
    stream.flush()
    assert b"runs/a ? 26M" in raw.getvalue()


def test_an_update_costs_less_than_a_fifth_of_a_millisecond():
    _, console = terminal()
    view = LiveView(console)
    view.start(INFO)
    records = [record(step) for step in range(1, 3001)]
    best = math.inf
    for _ in range(5):
        started = time.perf_counter()
        for item in records:
            view.step(item)
        best = min(best, (time.perf_counter() - started) / len(records))
    view.stop()
    assert best < 0.2e-3
