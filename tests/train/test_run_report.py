import json
import math
import os
import xml.etree.ElementTree as ElementTree

import pytest

from lezero.core.errors import FileError
from lezero.train.metrics import MetricsWriter, StepRecord
from lezero.train.run_documents import RunDocuments
from lezero.train.run_events import event_rows
from lezero.train.run_facts import RunFacts
from lezero.train.run_report import write_report

EVIL = "</script><script>alert(1)</script><img src=http://x>"
FORECAST = {
    "memory_bytes": 1100, "memory_parts": {"parameters": 700, EVIL: 400}, "step_seconds": 0.5,
    "time_parts": {"matrix products": 0.4}, "stated_error": {"memory": 0.1, "time": 0.25},
}  # fmt: skip
HARDWARE = {
    "facts": {"cpu": EVIL, "usable_cores": 2, "memory": {"total": 2**34}, "gpus": [], "amx": True},
    "ceilings": {
        "gemm_curve": [{"m": 1}],
        "op_overhead": 2e-6,
        "gemm_bf16": 2.02e12,
        "gemm_int8": 1e12,
        "memory_read": 2.6e10,
        "gemm_fp16": None,
    },
}
COMPILE = {
    "topic": "compile", "chosen": "eager", "unit": "s", "reason": f"timed {EVIL}",
    "candidates": {"eager": {"s": 1.0}, "blocks": {"s": None, "failed": "no compiler"}},
}  # fmt: skip
DOCUMENTS = {
    "forecast": FORECAST,
    "hardware": HARDWARE,
    "decisions": {"format": 1, "decisions": [COMPILE]},
    "sample": [{"prompt": "The ", "text": EVIL}],
    "verify": {
        "equal": False,
        "verdict": "parts at step 3, blocks.0.w",
        "losses": [3.0, 2.0, None],
        "plain_losses": [3.0, 2.5, 2.0],
    },
}
DAMAGED = ("", "{", "[]", "3", "null", '{"memory_bytes": "x"}', "[[1]]", '{"decisions": 4}',
           '{"facts": 1}', "[" * 9999, '[{"text": 1}]', '{"forecast": [NaN]}')  # fmt: skip


def record(step, **more):
    given = {"lr": 1e-3, "grad_norm": 1.0, "tokens": 64, "tokens_per_s": 160.0, "seconds": 0.4,
             "memory_bytes": 1000, "share_of_ceiling": 0.42}  # fmt: skip
    return StepRecord(step, 100, 9.0 / step, **given | more)


@pytest.fixture
def run(tmp_path):
    """A run of 100 steps, killed after 60, resumed from 50."""
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(1, 61):
            writer.step(record(step, memory_bytes=99_000 if step == 60 else 1000))
        writer.event("resume", step=50, text="resumed from step 50")
        for step in range(51, 101):
            writer.step(record(step, validation_loss=0.5 if step == 100 else None,
                               skipped="the loss is nan" if step == 70 else None))  # fmt: skip
            if step % 10 == 0:
                writer.event("checkpoint", step=step, stall_seconds=0.01)
    for name, data in DOCUMENTS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    (tmp_path / "config.yaml").write_text(f"run: a\n# {EVIL}\n")
    return tmp_path


def page(folder):
    html = write_report(folder).read_text(encoding="utf-8")
    return ElementTree.fromstring(html.split("\n", 1)[1])


def words(node):
    return " ".join(" ".join(node.itertext()).split())


def sections(root):
    return {s.find("h2").text: s for s in root.iter("section")}


def test_key_figures(run):
    root = page(run)
    tiles = {words(t.find("span")): words(t) for t in root.iter("div") if t.get("class") == "tile"}
    assert "0.5000" in tiles["Validation loss"]
    assert "160 tok/s" in tiles["Throughput"]
    assert "42%" in tiles["Share of the GEMM ceiling"]
    assert "1000 B forecast 1.07 KiB, 10% above measured" in tiles["Peak memory"]
    assert "0.40 s forecast 0.50 s, 25% above measured" in tiles["Time a step"]
    assert "1 at step 50" in tiles["Resumes"]
    assert "1 loss or gradient not finite" in tiles["Skipped steps"]
    assert words(root.find("body/header/p")).startswith("100 of 100 steps · 6,400 tokens")


def test_an_error_beyond_100_percent_has_one_side(run):
    """Of small models, whose forecast may be off by no less than 32 MiB."""
    told = {**FORECAST, "stated_error": {"memory": 1.4, "time": 0.25}}
    (run / "forecast.json").write_text(json.dumps(told))
    held = words(sections(page(run))["Forecast against measured"])
    assert "forecast peak, at most 2.4 times as much" in held
    assert "±25%" in held
    assert "140%" not in held
    assert "−" not in held, "memory is never negative"


@pytest.mark.parametrize(("changed", "then"), [(True, "2 KiB"), (False, "97.7 KiB")])
def test_the_forecast_is_held_against_the_steps_that_it_is_of(tmp_path, changed, then):
    (tmp_path / "forecast.json").write_text(json.dumps({"memory_bytes": 2048, "step_seconds": 2.0}))
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(1, 21):
            writer.step(record(step, memory_bytes=100_000, seconds=9.0))
        writer.event("checkpoint", step=20, memory_bytes=100_000)
        writer.event("resume", step=20, changed=changed)
        for step in range(21, 31):
            writer.step(record(step, memory_bytes=2048, seconds=2.0))
        writer.event("resume", step=25, changed=False)
        for step in range(26, 31):
            writer.step(record(step, memory_bytes=2048, seconds=2.0))
    facts = RunFacts(RunDocuments.read(tmp_path))
    assert facts.memory.measured == (2048 if changed else 100_000)
    assert facts.step_time.measured == (2.0 if changed else 9.0)
    assert len(facts.forecast_steps("seconds")[0]) == (10 if changed else 30)
    assert then in words(sections(page(tmp_path))["Forecast against measured"])


def test_plots_show_loss_validation_resume_memory_and_rates(run):
    found = sections(page(run))
    loss = words(found["Loss"])
    for text in ("training", "validation", "resumed"):
        assert text in loss
    marks = [e for e in found["Loss"].iter("line") if e.get("class") == "mark"]
    assert len(marks) == 1
    forecast = words(found["Forecast against measured"])
    for text in ("forecast peak, ±10%", "measured", "parameters", "matrix products"):
        assert text in forecast
    assert [e for e in found["Forecast against measured"].iter("rect") if e.get("class") == "band"]
    titles = [f.text for s in found.values() for f in s.iter("figcaption")]
    for title in ("Throughput", "Memory", "Learning rate", "Gradient norm"):
        assert title in titles


def test_documents_are_shown(run):
    found = sections(page(run))
    assert "no compiler" in words(found["Decisions"])
    assert "2.02 TFLOP/s" in words(found["Hardware"])
    assert "1.00 TOP/s" in words(found["Hardware"])
    assert "16.0 GiB" in words(found["Hardware"])
    assert "parts at step 3" in words(found["Proof"])
    assert "plain PyTorch" in words(found["Proof"])
    assert "curve" not in words(found["Hardware"])
    assert "resumed from step 50" in words(found["What happened"])
    assert "the loss is nan" in words(found["What happened"])
    assert "the last of 5" in words(found["What happened"])
    assert "run: a" in words(found["Config"])


def test_notes_are_shown_each():
    """Five configs that a resume changed are five things to know."""
    notes = [{"event": "note", "text": f"changed {key}"} for key in "abcde"]
    other = [{"event": "skipped", "step": step} for step in range(5)]
    rows = event_rows(notes + other)
    assert [row[3] for row in rows] == [f"changed {key}" for key in "abcde"] + [""]
    assert rows[-1][2] == "skipped, the last of 5"


def test_hostile_content_stays_text(run):
    root = page(run)
    assert len(list(root.iter("script"))) == 1
    assert not list(root.iter("img"))
    assert EVIL in words(root)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "decisions.json", "forecast.json",
                                  "hardware.json", "sample.json", "verify.json"])  # fmt: skip
def test_what_is_missing_is_said(run, name):
    (run / name).unlink()
    said = words(page(run))
    assert "lz verify does that" in said if name == "verify.json" else f"{name}: not there." in said


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_documents_cost_their_section_only(run, content):
    for name in ("decisions", "forecast", "hardware", "sample", "verify"):
        (run / f"{name}.json").write_text(content)
    assert "160 tok/s" in words(page(run))


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "decisions.json"])
def test_a_pipe_in_place_of_a_document_is_not_waited_for(run, name):
    (run / name).unlink()
    os.mkfifo(run / name)
    assert f"{name}: not a regular file" in words(page(run))


def test_a_run_without_a_finite_loss(run):
    with MetricsWriter(run / "metrics.jsonl") as writer:
        writer.event("resume", step=0)
        writer.step(StepRecord(1, 5, math.nan, grad_norm=math.inf, lr=0.0))
    assert "Final training loss n/a" in words(page(run))


def test_no_folder_and_no_run(tmp_path):
    with pytest.raises(FileError, match="no such run folder"):
        write_report(tmp_path / "x")
    with pytest.raises(FileError, match="holds none of"):
        write_report(tmp_path)
    (tmp_path / "f").write_text("")
    with pytest.raises(FileError, match="is a file"):
        write_report(tmp_path / "f")


def test_a_page_of_somebody_else_is_not_written_over(run):
    written = write_report(run)
    assert write_report(run) == written
    written.write_text("<footer>mine</footer>")
    with pytest.raises(FileError, match=r"report\.html: was not written by LeZero.*move it away"):
        write_report(run)
    assert written.read_text() == "<footer>mine</footer>"


def test_the_page_stays_small_however_long_the_run(tmp_path):
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, 30_001):
            line = {"step": step, "loss": 2 + step % 9, "lr": 1e-3, "grad_norm": 1}
            more = {"tokens_per_s": 9, "seconds": 0.1, "memory_bytes": 10}
            file.write(json.dumps(line | more) + "\n")
    assert write_report(tmp_path).stat().st_size < 600_000
