"""The demo's end: a quantized model is served, asked once, and ended; what fails is told."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

import lezero as lz
from lezero.compress.quantize import save_quantized
from lezero.core.errors import LeZeroError
from lezero.data.tokenizer import bytes_tokenizer
from lezero.jobs import demo_serve
from tests.serve.models import small
from tests.train.runs import filled_cache, measured_machine

__all__ = ["filled_cache", "measured_machine"]
pytestmark = pytest.mark.usefixtures("measured_machine")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    tokenizer = bytes_tokenizer()
    tokenizer.save(folder / "tokenizer")
    made = small(vocab=tokenizer.vocab_size)
    lz.quantize_(made, lz.Int4Weight(group=32), objective="size")
    save_quantized(made, folder / "int4", tokenizer_folder=folder / "tokenizer")
    return folder / "int4"


def test_the_model_is_served_asked_and_ended(model: Path) -> None:
    lines = list(demo_serve.serve_and_ask(model, "The function"))
    said = {line[:12].strip(): line[12:] for line in lines if not line.startswith(" ")}
    assert said["address"].startswith("http://127.0.0.1:")
    assert said["question"] == "continue 'The function'"
    assert said["answer"]
    assert said["asked"] == "through the package openai"
    assert re.match(r"tokens/s of one request: [\d,.]+ likeliest, ", said["forecast"])
    assert " tokens/s for one alone where chance draws them, " in said["measured"]
    assert lines[-1] == "server      ended cleanly (SIGTERM, exit status 0)"


def test_without_openai_and_with_an_end_that_is_not_clean(model: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.setattr(demo_serve, "_END", signal.SIGKILL)
    lines: list[str] = []
    with pytest.raises(LeZeroError, match="ended with status -9"):
        lines.extend(demo_serve.serve_and_ask(model, "x"))  # those before the error stay
    assert "the package openai is not installed" in lines[-1]


def test_a_model_that_does_not_open(tmp_path: Path) -> None:
    with pytest.raises(LeZeroError, match="status 1 before it served"):
        list(demo_serve.serve_and_ask(tmp_path / "nothing", "x"))
