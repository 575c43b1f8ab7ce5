"""Every file of `examples/` runs as a user runs it, and leaves nothing but `runs/` behind."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.house.floors import ROOT

EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
SAYS: dict[str, list[str]] = {
    "callbacks": ["validation did not improve 2 times: stopping", "the slowest steps: ["],
    "custom_data": ["two ranks take the same batch: True"],
    "dynamic_layer": ["too early: ", "step 9: loss"],
    "forecast": ["Fits."],
    "from_pytorch": ["the same outputs: True", "refused: "],
    "huggingface": ["equal logits: True"],
    "precision_switch": ["now bf16; AdamW goes on at its step 20", "weights are torch.float32"],
    "quantize": ["int4 g64", "plain again: Linear", "refused: lz.quantize_: error of the outputs"],
    "resume": ["resumed from step 10", "bit for bit: True"],
    "train_config": ["step 20, validation loss", "report.html"],
    "train_loop": ["step 20: loss", "saved step-00000020", "precision: "],
}


@dataclass
class Outcome:
    status: int
    output: str
    left: list[str]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All examples, two at a time: most of what they take is importing torch."""
    folders = {name: tmp_path_factory.mktemp(name) for name in EXAMPLES}
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda name: run(EXAMPLES[name], folders[name]), EXAMPLES)
        return dict(zip(EXAMPLES, found, strict=True))


def run(path: Path, folder: Path) -> Outcome:
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    left = [item.name for item in folder.iterdir() if not item.name.startswith("torchinductor_")]
    return Outcome(done.returncode, done.stdout, left)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    assert outcome.status == 0, outcome.output
    assert "Traceback" not in outcome.output
    for words in SAYS.get(name, []):
        assert words in outcome.output
    assert outcome.left in ([], ["runs"])


def test_the_first_line_of_each_example_says_what_it_shows() -> None:
    for path in EXAMPLES.values():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith('"""'), path.name
        assert first.endswith('."""'), path.name
