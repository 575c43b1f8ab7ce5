"""The options of `lz generate` that choose tokens reach whatever draws them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lezero.cli.main import main
from lezero.data.tokenizer import bytes_tokenizer
from lezero.jobs.writer import open_writer
from lezero.models import save_hf
from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from tests.serve.models import small

DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "seed": 0}
WAYS = ("a file", "one prompt", "one prompt by plain generation")
CHANGES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "nothing": ([], {}),
    "seed": (["--seed", "11"], {"seed": 11}),
    "temperature": (["--temperature", "0"], {"temperature": 0.0}),
    "top_k": (["--top-k", "2"], {"top_k": 2}),
    "top_p": (["--top-p", "0.3"], {"top_p": 0.3}),
    "min_p": (["--min-p", "0.5"], {"min_p": 0.5}),
    "all": (
        [
            "--seed",
            "5",
            "--temperature",
            "1.5",
            "--top-k",
            "40",
            "--top-p",
            "0.9",
            "--min-p",
            "0.1",
        ],
        {"seed": 5, "temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    bytes_tokenizer().save(made)
    return save_hf(small(vocab=bytes_tokenizer().vocab_size), made)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, weights="bf16")


def from_python(llm: LLM, folder: Path, way: str, sampling: dict[str, Any]) -> str:
    if way.endswith("by plain generation"):
        return "".join(open_writer(str(folder)).write("abc", 24, **sampling))
    text = llm.generate("abc", SamplingParams(max_tokens=24, **sampling))[0].text
    return text if way == "a file" else f"abc{text}"


def from_command(folder: Path, way: str, words: list[str], tmp_path: Path, capsys: Any) -> str:
    words = ["generate", str(folder), "-n", "24", *words]
    if way != "a file":
        weights = [] if way.endswith("by plain generation") else ["--weights", "bf16"]
        assert main([*words, "-p", "abc", *weights]) == 0
        return str(capsys.readouterr().out).removesuffix("\n")
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "abc"}\n')
    assert main([*words, "--input", str(source), "--weights", "bf16"]) == 0
    return str(json.loads(capsys.readouterr().out)["text"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_an_option_changes_the_text_as_from_python(
    folder: Path,
    llm: LLM,
    way: str,
    change: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, given = CHANGES[change]
    expected = from_python(llm, folder, way, {**DEFAULTS, **given})
    assert (expected == from_python(llm, folder, way, DEFAULTS)) == (not given)
    assert from_command(folder, way, words, tmp_path, capsys) == expected
