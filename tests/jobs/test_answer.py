"""`lz generate`: one prompt through the engine, and a file of prompts."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lezero.cli.main import main
from lezero.core import device
from lezero.data.tokenizer import bytes_tokenizer
from lezero.models import save_hf
from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
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
    assert main(["generate", str(folder), *words]) == 1
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert ["error" in answer for answer in found] == [False, True, True, True, True, False]
    assert found[0]["text"] == found[-1]["text"]
    assert "not UTF-8" in found[1]["error"]
    assert "surrogate" in found[2]["error"]
    assert "priority" in found[4]["error"]


@pytest.mark.skipif(device.device().type != "cpu", reason="the memory of an accelerator is another")
def test_memory_is_compared_with_the_forecast_at_the_end(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "abc"}\n' * 3)
    assert main(["generate", str(folder), "--input", str(source), "-n", "4"]) == 0
    *_, told, memory = capsys.readouterr().err.splitlines()
    assert told.startswith("3 answers (0 errors), 12 tokens in")
    assert re.match(r"memory +\S+ [KMG]iB taken; forecast \S+ MiB with the cache that was", memory)


def test_half_a_letter_in_an_id_loses_no_answer(folder: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "abc", "id": "\\ud83d"}\n{"prompt": "abc", "id": "é"}\n')
    words = ["--input", str(source), "--output", str(target), "-n", "4"]
    assert main(["generate", str(folder), *words]) == 0
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["id"] for answer in found] == ["\ud83d", "é"]


def test_through_pipes_of_any_encoding(folder: Path, tmp_path: Path) -> None:
    words = ["generate", str(folder), "--input", "-", "--output", "-", "-n", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "lezero", *words],
        input='{"prompt": "abc", "id": "é 京"}\n'.encode(),
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        cwd=tmp_path,
        check=True,
    )
    assert json.loads(done.stdout)["id"] == "é 京"
    assert not (tmp_path / "-").exists()


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


def test_what_the_files_hold_is_there_until_there_are_answers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, link = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "link.jsonl"))
    source.write_text('{"prompt": "abc"}\n')
    target.write_text("of yesterday\n" * 99)
    words = ["--input", str(source), "-n", "4", "--output"]
    assert main(["generate", f"{folder}-typo", *words, str(target)]) == 1
    assert "typo" in capsys.readouterr().err
    assert target.read_text() == "of yesterday\n" * 99
    assert main(["generate", str(folder), *words, str(target)]) == 0
    assert [json.loads(line)["line"] for line in target.read_text().splitlines()] == [1]
    link.hardlink_to(source)
    for same in (source, link):
        assert main(["generate", str(folder), *words, str(same)]) == 1
        assert f"{same}: is the file of prompts" in capsys.readouterr().err
        assert source.read_text() == '{"prompt": "abc"}\n'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_errors_name_the_file_that_they_are_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "abc"}\n' * 3)
    words = ["generate", str(folder), "-n", "4", "--input"]
    assert main([*words, str(source), "--output", "/dev/full"]) == 1
    assert "error: /dev/full: No space left on device" in capsys.readouterr().err
    assert main([*words, "/proc/self/mem", "--output", str(tmp_path / "out.jsonl")]) == 1
    assert "error: /proc/self/mem: Input/output error" in capsys.readouterr().err


def test_a_reader_of_the_answers_that_goes_away_is_quiet(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "abc"}\n' * 3)
    words = ["generate", str(folder), "--input", str(source), "-n", "4"]
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "lezero", *words], stdout=gone, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 141
    assert "error:" not in done.stderr


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--weights", "int8"], {"weights": "int8"}),
        (["--weights", "bf16", "--kv", "int8"], {"weights": "bf16", "kv": "int8"}),
        (["--draft", "FOLDER"], {}),
    ],
)
def test_one_prompt_is_continued_by_the_engine_where_its_options_are_given(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    options: dict[str, Any],
) -> None:
    given = [str(folder) if word == "FOLDER" else word for word in words]
    assert main(["generate", str(folder), "-p", "abc", "-n", "9", *given]) == 0
    params = SamplingParams(max_tokens=9, temperature=0.8, top_k=50, seed=0)
    expected = LLM(folder, **options).generate("abc", params)[0].text
    assert capsys.readouterr().out == f"abc{expected}\n"
    assert main(["generate", str(folder), "-p", "x" * 400, *given]) == 0
    assert len(capsys.readouterr().out) > 400
    assert main(["generate", str(folder), "-p", "abc", "-n", "0", *given]) == 2
    assert "-n: got '0', allowed is greater than or equal to 1" in capsys.readouterr().err


def test_one_prompt_is_continued_by_the_engine_on_an_accelerator(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain generation runs where the model is read, on the processor."""
    module = importlib.import_module("lezero.jobs.answer")

    def opened(place: str, *, weights: str, **_: Any) -> None:
        raise LookupError(weights)

    monkeypatch.setattr(device, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(module, "LLM", opened)
    with pytest.raises(LookupError, match="auto"):
        list(module.continued(str(folder), "abc", 3, {}))


def test_one_prompt_is_continued_by_transformers_where_it_must(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 257, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    config = transformers.GPT2Config(**shape, bos_token_id=256, eos_token_id=256)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    bytes_tokenizer().save(tmp_path)
    assert main(["generate", str(tmp_path), "-p", "abc", "-n", "3"]) == 0
    assert capsys.readouterr().out.startswith("abc")


def test_options_without_a_meaning_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "abc"}\n')
    assert main(["generate", str(folder), "-p", "abc", "--output", "x"]) == 2
    assert "output: got x, which has no meaning for one prompt" in capsys.readouterr().err
    assert main(["generate", str(folder), "-p", "abc", "--input", str(source)]) == 2
    assert "prompt: got abc, which has no meaning for an input file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--draft", "{folder}"], "draft: got a model for speculate 'off'"),
        (["--weights", "int5"], "weights: got 'int5', allowed are auto, fp32, bf16, int8, int4"),
        (["--kv", "int4"], "kv: got 'int4', allowed are auto, bf16, int8"),
        (["--context", "0"], "context: got 0, allowed is 1 or more"),
    ],
)
def test_a_server_refuses_options_before_the_machine_is_measured(
    folder: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    module = importlib.import_module("lezero.profiler.hardware")
    monkeypatch.setattr(module, "hardware", lambda: pytest.fail("measures for ten seconds"))
    words = [word.format(folder=folder) for word in words]
    assert main(["serve", str(folder), *words, "--port", "0"]) == 2
    assert said in capsys.readouterr().err


def test_keys_and_values_in_int8(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(answers(folder, tmp_path, "--kv", "int8")) == 2
    assert "keys/values int8: as asked" in capsys.readouterr().err
