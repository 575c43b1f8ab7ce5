"""What a server chose is written where `lz why` reads it, and weights are chosen once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lezero.cli.main import main
from lezero.core.errors import FileError
from lezero.report.decisions import read_decisions
from lezero.serve.batching.module import InferModule
from lezero.serve.batching.plan import Plan, Tried
from lezero.serve.server.batched import BatchServer
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.record import Record, record_of
from lezero.serve.threads import Placement
from tests.serve.server.running import small_llm

PLAN = Plan(
    256,
    work=24.0,
    rate=480.0,
    tried=(Tried(1, 0.0, 300.0, 0.0), Tried(12, 0.0, 480.0, 300.0), Tried(14, 0.0, None, 480.0)),
)


def test_a_plan_is_told_with_what_it_was_chosen_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Record(tmp_path / "new")
    record.take_plan(PLAN, 2.0, step=7, target_s=0.05)
    assert main(["why", str(tmp_path / "new"), "batching"]) == 0
    told = capsys.readouterr().out
    assert "batching: up to 12 a step, delay 0 ms" in told
    assert "99% within 50 ms" in told
    assert "fewer than 480" in told
    (found,) = json.loads((tmp_path / "new" / "decisions.json").read_text())["decisions"]
    assert found["candidates"]["up to 1 a step, delay 0 ms"] == {"requests/s": 300.0}
    assert found["step"] == 7


def test_weights_are_taken_again_and_the_plan_is_found_anew(tmp_path: Path) -> None:
    first = Record(tmp_path)
    first.decisions.choose("encoder weights", {"fp32": lambda: 2.0, "int8": lambda: 1.0})
    first.take_plan(PLAN, 2.0, step=0, target_s=0.05)
    again = Record(tmp_path)

    def never() -> float:
        raise AssertionError("measured again")

    assert again.decisions.choose("encoder weights", {"fp32": never, "int8": never}) == "int8"
    again.take_plan(Plan(3, delay_s=0.002), 1.0, step=0, target_s=0.05)
    found = again.decisions.records["batching"]
    assert found.chosen == "up to 3 a step, delay 2 ms"
    assert found.overridden


def test_what_was_asked_for_once_is_not_taken_again(tmp_path: Path) -> None:
    """`--weights fp32` at one start, `--weights auto` at the next."""
    measures = {"fp32": lambda: 2.0, "int8": lambda: 1.0}
    asked = Record(tmp_path)
    asked.decisions.choose("encoder weights", measures, override="fp32")
    asked.write()
    again = Record(tmp_path)
    assert again.decisions.choose("encoder weights", measures) == "int8"
    assert not again.decisions.records["encoder weights"].replayed


def test_what_was_measured_outlives_a_start_that_asked_for_something_else(tmp_path: Path) -> None:
    def start(override: str | None, int8: float) -> str:
        record = Record(tmp_path, "model")
        measures = {"fp32": lambda: 2.0, "bf16": lambda: 3.0, "int8": lambda: int8}
        found = record.decisions.choose("encoder weights", measures, override=override)
        record.take_plan(PLAN, 2.0, step=0, target_s=0.05)
        return found

    assert start(None, 1.0) == "int8"
    assert start("bf16", 1.0) == "bf16"
    assert start("bf16", 1.0) == "bf16"
    assert start(None, 9.0) == "int8", "taken again"


def test_another_model_in_the_same_folder_is_measured_anew(tmp_path: Path) -> None:
    folder, models = tmp_path / "record", [tmp_path / "a", tmp_path / "b"]
    for number, model in enumerate(models):
        model.mkdir()
        (model / "weights").write_text("x" * number)

    def chosen(model: Path, seconds: float) -> str:
        record = record_of(str(folder), "name", str(model))
        assert record.folder == folder
        measures = {"fp32": lambda: 1.0, "int8": lambda: seconds}
        found = record.decisions.choose("encoder weights", measures)
        record.write()
        return found

    assert chosen(models[0], 0.5) == "int8"
    assert chosen(models[0], 2.0) == "int8", "taken again"
    assert chosen(models[1], 2.0) == "fp32"
    assert chosen(models[0], 2.0) == "fp32", "the folder holds those of one model"


def test_a_server_writes_its_plan_down(tmp_path: Path) -> None:
    record = Record(tmp_path)
    model = InferModule(torch.nn.Linear(4, 2), torch.zeros(1, 4))
    server = BatchServer(model, ServeConfig(port=0), "m", None, record)
    try:
        server.batches.rehearse()
        before = json.loads((tmp_path / "decisions.json").read_text())["decisions"][0]
        assert before["candidates"]
        server.batches.batcher.plan = Plan(2, work=2.0, rate=5.0)
        server.batches._take_plan()
        after = json.loads((tmp_path / "decisions.json").read_text())["decisions"][0]
        assert after["chosen"] == "up to 2 a step, delay 0 ms"
    finally:
        server._socket.close()


def test_a_language_model_says_how_it_keeps_weights_and_keys(tmp_path: Path) -> None:
    record = Record(tmp_path)
    llm = small_llm(context=128, max_requests=2)
    record.take_engine(llm, weights="bf16", kv="auto")
    found = {x["topic"]: x for x in read_decisions(tmp_path)["decisions"]}
    assert found["weights"]["chosen"] == llm.program.description
    assert found["weights"]["overridden"]
    assert found["keys and values"]["chosen"] == llm.program.kv
    assert found["keys and values"]["reason"] == llm.forecast.kv.partition(": ")[2]
    assert not found["keys and values"]["overridden"]


def test_other_files_are_another_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("a")
    one = record_of(None, "my model", str(model))
    assert one.folder == record_of(None, "my model", str(model)).folder
    assert one.folder.is_relative_to(tmp_path / "cache")
    (model / "weights").write_text("other")
    assert record_of(None, "my model", str(model)).folder != one.folder
    assert record_of(str(tmp_path / "mine"), "x", "y").folder == tmp_path / "mine"


def test_damaged_records_are_named(tmp_path: Path) -> None:
    (tmp_path / "decisions.json").write_text("{")
    with pytest.raises(FileError, match="not valid JSON"):
        Record(tmp_path)


def test_a_folder_that_cannot_be_looked_at_ends_no_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = Record(tmp_path / ("x" * 300))  # as one that may not be entered, which root may
    record.take_placement(Placement(4, 0.0005))
    assert "decisions are not kept" in caplog.text


def test_a_record_is_read_before_a_model_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "decisions.json").write_text("{")
    (tmp_path / "no-model.gguf").touch()
    words = ["serve", str(tmp_path / "no-model.gguf"), "--port", "0", "--record", str(tmp_path)]
    assert main(words) == 1
    assert "not valid JSON" in capsys.readouterr().err


@pytest.mark.parametrize("own_s", [0.0004, 0.007, None])
def test_where_threads_lie_is_told_as_it_is_at_this_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], own_s: float | None
) -> None:
    before = Record(tmp_path)
    before.take_placement(Placement(4, 0.0005))
    record = Record(tmp_path)
    record.take_placement(None)  # nothing to choose
    record.take_placement(Placement(2, 0.008, own_s))
    assert main(["why", str(tmp_path), "threads"]) == 0
    told = capsys.readouterr().out
    chosen = "a core each" if own_s == 0.0004 else "wherever the system puts them"
    assert f"threads: {chosen}" in told
    assert "2 threads; how long they take to wake after a pause" in told
    (found,) = json.loads((tmp_path / "decisions.json").read_text())["decisions"]
    assert found["candidates"]["wherever the system puts them"] == {"ms": 8.0}
    assert ("a core each" in found["candidates"]) == (own_s is not None)
