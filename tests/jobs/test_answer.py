"""`lz generate --input`: a file of prompts, with a draft model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lezero.cli.main import main
from lezero.data.tokenizer import bytes_tokenizer
from lezero.models import save_hf
from tests.serve.models import small


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    bytes_tokenizer().save(made)
    return save_hf(small(vocab=bytes_tokenizer().vocab_size), made)


def answers(folder: Path, tmp_path: Path, *words: str) -> list[object]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "Paris is")))
    command = ["generate", str(folder), "--input", str(source), "--output", str(target)]
    assert main([*command, "--weights", "bf16", "-n", "12", *words]) == 0
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_a_draft_changes_no_answer(folder: Path, tmp_path: Path) -> None:
    plain = answers(folder, tmp_path)
    assert len(plain) == 2
    assert answers(folder, tmp_path, "--draft", str(folder)) == plain


def test_without_output_answers_go_to_the_terminal(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "abc"}\n')
    for _ in range(2):  # the terminal stays open
        assert main(["generate", str(folder), "--input", str(source), "-n", "4"]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == 4


def test_a_line_that_is_no_text_harms_no_other(folder: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = b'{"prompt": "abc", "priority": 1}\n'
    bad = [b'{"prompt": "\xff\xfe"}\n', b'{"prompt": "a\\ud800"}\n', b'{"messages": 5}\n']
    bad.append(b'{"prompt": "a", "priority": "high"}\n')
    source.write_bytes(b"\xef\xbb\xbf" + good + b"".join(bad) + good)
    words = ["--input", str(source), "--output", str(target), "-n", "4"]
    assert main(["generate", str(folder), *words]) == 0
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert ["error" in answer for answer in found] == [False, True, True, True, True, False]
    assert found[0]["text"] == found[-1]["text"]
    assert "not UTF-8" in found[1]["error"]
    assert "surrogate" in found[2]["error"]
    assert "priority" in found[4]["error"]


def test_files_are_opened_before_the_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "abc"}\n')
    target = str(tmp_path / "none" / "out.jsonl")
    words = ["generate", str(folder), "--input", str(source), "--output", target]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert target in error
    assert "weights" not in error


def test_options_of_files_are_refused_with_a_prompt(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(folder), "-p", "abc", "--weights", "int8"]) == 2
    assert "weights: got int8, which is for --input" in capsys.readouterr().err


def test_a_draft_is_told_how_it_is_used(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder), "--draft", str(folder)]) == 2
    assert "draft: got a model for speculate 'off'" in capsys.readouterr().err


def test_keys_and_values_in_int8(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(answers(folder, tmp_path, "--kv", "int8")) == 2
    assert "keys/values int8: as asked" in capsys.readouterr().err
    assert main(["serve", str(folder), "--kv", "int4"]) == 2
    assert "kv: got 'int4', allowed are auto, bf16, int8" in capsys.readouterr().err
