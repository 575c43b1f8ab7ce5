"""`lz plan`: a table or one JSON object, and a refusal that says what would fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lezero.profiler
import lezero.train.recipe
from lezero.cli.main import main
from lezero.train.config import RunConfig
from lezero.train.recipe import plan_inputs
from tests.leaks import own_cache


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LEZERO_CACHE", str(own_cache(tmp_path / "cache")))
    monkeypatch.setattr(lezero.profiler, "hardware", lambda: None)
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {layers: 1, dim: 32, heads: 2}\n"
        "data: {train: python-docs, tokenizer: bytes, sequence: 32}\n"
        "train: {steps: 10, batch: 4, precision: fp32}\n"
    )
    return str(path)


def test_the_table(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config]) == 0
    text = capsys.readouterr().out
    assert "Peak memory of a rank (" in text
    assert "Fits." in text


def test_json(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, "--json", "--set", "train.batch=8", "-n", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 2
    assert found["tokens_per_step"] == 8 * 32
    assert {"memory_bytes", "memory_parts", "step_seconds", "time_parts"} <= set(found)


def test_the_ranks_are_those_that_were_started_and_the_first_tells_it(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds: list[int] = []

    def inputs(asked: RunConfig, world: int) -> Any:
        worlds.append(world)
        return plan_inputs(asked, world=1)  # quicker: nothing is timed while others compute

    monkeypatch.setattr(lezero.train.recipe, "plan_inputs", inputs)

    def planned(*words: str, **started: str) -> int | None:
        for name in ("WORLD_SIZE", "RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in started.items():
            monkeypatch.setenv(name, value)
        assert main(["plan", config, "--json", *words]) == 0
        told = capsys.readouterr()
        assert told.err == ""
        assert len(told.out.splitlines()) == len(worlds)
        return worlds.pop() if worlds else None

    assert planned(WORLD_SIZE="2", RANK="0") == planned(WORLD_SIZE="2") == 2
    assert planned("-n", "4", WORLD_SIZE="2", RANK="0") == 4
    assert planned(WORLD_SIZE="2", RANK="1") is planned("-n", "4", WORLD_SIZE="2", RANK="1") is None
    assert planned() == planned(RANK="3") == planned(WORLD_SIZE="1", RANK="0") == 1
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert main(["plan", config]) == 2
    assert "WORLD_SIZE='two': allowed is a whole number" in capsys.readouterr().err


def test_too_large_is_told_with_what_would_fit(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = 2 * 4194301  # a prime: few micro-batches divide it, so few are tried
    assert main(["plan", config, "--set", f"train.batch={batch}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: this run does not fit")
    assert "train.accumulate=" in error


def test_missing_data_files_are_named_beside_the_forecast(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    there, gone = tmp_path / "there.txt", tmp_path / "gone.txt"
    there.write_text("some text for a few rows of thirty-two tokens, which is not much")
    names = ["--set", f"data.train=[{there}, {gone}]", "--set", f"data.validation=[{tmp_path}/*.x]"]
    names += ["--set", f"run={tmp_path / 'run'}"]
    assert main(["plan", config, *names]) == main(["train", config, *names]) == 1
    found = capsys.readouterr()
    assert "Fits." in found.out
    assert f"Not found: data.train: {gone}: no such file or folder" in found.out
    assert f"Not found: data.validation: no file matches {tmp_path}/*.x" in found.out
    assert "Assumed instead: text for at least one row of 32 tokens" in found.out
    planned, trained = found.err.strip().splitlines()
    said = f"error: data.train: {gone}: no such file or folder (python-docs is built in)"
    assert planned.startswith(f"{said}; data.validation: no file matches")
    assert trained == said


def test_missing_data_files_are_named_in_json(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gone = tmp_path / "gone.txt"
    assert main(["plan", config, "--json", "--set", f"data.train={gone}"]) == 1
    found = capsys.readouterr()
    answer = json.loads(found.out)
    assert [name.split(":")[:2] for name in answer["missing_files"]] == [["data.train", f" {gone}"]]
    assert answer["assumed"] == "text for at least one row of 32 tokens"
    assert answer["fits"]
    assert str(gone) in found.err
    assert main(["plan", config, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["missing_files"], answer["assumed"]) == ([], None)


def test_unknown_keys_are_errors(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, "--set", "train.batsh=8"]) == 2
    assert "batch" in capsys.readouterr().err
