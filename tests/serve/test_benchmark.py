"""What the benchmark of serving says of its sides."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.house.floors import ROOT
from tests.house.test_benchmarks import loaded
from tests.serve.models import small


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    loaded("_table")
    return loaded("serving")


@pytest.mark.parametrize(
    ("perplexity", "best"),
    [((8.0, 8.02, 8.1), "int4"), ((8.0, 8.02, 8.3), "int8"), ((8.0, 8.1, 8.3), None)],
)
def test_the_best_weights_are_the_fastest_within_the_bars(
    benchmark: ModuleType, perplexity: tuple[float, ...], best: str | None
) -> None:
    speed = {"bf16": 1.0, "int8": 2.0, "int4": 3.0, "llama.cpp": 1.5}
    found: dict[str, list[dict[str, Any]]] = {
        name: [{"decode": x, "decode_long": x / 2}] for name, x in speed.items()
    }
    found["openvino-genai"] = [{"decode": 1.4, "decode_long": 1.0}]
    for name, one in zip(("bf16", "int8", "int4"), perplexity, strict=True):
        found[name][0]["perplexity"] = one
    figures = benchmark._figures(benchmark.Result(found, {}))
    assert figures["weights"] == best
    assert figures["decode_vs_best_peer"] == (best and speed[best] / 1.5)
    assert figures["decode_long_vs_best_peer"] == (best and speed[best] / 2)
    assert figures["quality_int4"] == perplexity[2] / 8.0


def test_int4_opens_the_file_as_its_peers_do(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks would else be rounded to bf16, and then once more to 4 bits."""
    made: list[Any] = []
    monkeypatch.setattr(benchmark, "compare", lambda sides, **_: made.extend(sides))
    monkeypatch.setattr(benchmark, "_file", lambda: Path("a.gguf"))
    options = argparse.Namespace(threads=2, quick=False, rounds=1)
    benchmark._engine(options, "folder", "")
    places = {x.name: x.command[x.command.index("--place") + 1] for x in made if x.command}
    assert places["bf16"] == places["int8"] == "folder"
    assert places["int4"] == "a.gguf"


def test_perplexity_is_that_of_the_model(benchmark: ModuleType) -> None:
    from quantization_parts.texts import perplexity, windows
    from serving_parts.quality import text_perplexity

    from lezero.serve.llm import LLM

    model = small(vocab=256)
    rows = windows(lambda text: list(text.encode()[:1000]), 2, 64, held=True)
    found = text_perplexity(LLM(small(vocab=256), weights="fp32"), quick=True)
    assert found == pytest.approx(perplexity(model, rows), rel=1e-4)
