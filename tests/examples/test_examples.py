"""Every file of `examples/` runs as a user runs it, and leaves nothing but `runs/` behind."""

from __future__ import annotations

import json
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
    """All examples, two at a time."""
    folders = {name: tmp_path_factory.mktemp(name) for name in EXAMPLES}
    names = list(EXAMPLES)
    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(lambda half: run(half, folders), (names[::2], names[1::2]))
        return {name: outcome for half in halves for name, outcome in half.items()}


def run(names: list[str], folders: dict[str, Path]) -> dict[str, Outcome]:
    """Runs these one after another."""
    asked = [
        {
            "path": str(EXAMPLES[name]),
            "folder": str(folders[name]),
            "output": f"{folders[name]}.txt",
        }
        for name in names
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.examples.forked"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        input="".join(json.dumps(one) + "\n" for one in asked),
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    found = {}
    for name, one, status in zip(names, asked, done.stdout.split(), strict=True):
        left = [x.name for x in folders[name].iterdir() if not x.name.startswith("torchinductor_")]
        found[name] = Outcome(int(status), Path(one["output"]).read_text(), left)
    return found


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
