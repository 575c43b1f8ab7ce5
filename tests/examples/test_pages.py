"""The Python of the pages on training, verifying, memory and codecs runs as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.floors import ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["training", "memory-pool", "verify", "codecs"])
def test_the_code_of_the_page_runs(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / f"docs/{page}.md").read_text(encoding="utf-8"))
    assert blocks
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configs_of_the_training_page_are_ones() -> None:
    import yaml

    from lezero import RunConfig

    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    whole, split = (yaml.safe_load(block) for block in blocks)
    assert RunConfig.parse(whole, "whole").micro_batch(2) == 8
    assert RunConfig.parse({**whole, **split}, "split").zero.stage == 3
