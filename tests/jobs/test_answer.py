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
