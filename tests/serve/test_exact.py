"""The engine on SmolLM2-135M: the tokens of the oracle and of transformers.

A short form of `benchmarks/serving_parts/exact.py`, which has 20 prompts of 64 tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lezero.core.errors import FileError
from lezero.models import packaged_gguf
from tests.house.floors import ROOT


def test_smollm2_answers_as_the_oracle_and_transformers() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    try:
        packaged_gguf()
    except FileError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "benchmarks.serving_parts.exact"]
    done = subprocess.run(
        [*command, "--prompts", "4", "--tokens", "8"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == 32
    assert (found["differ_from_oracle"], found["differ_from_transformers"]) == (0, 0)
    assert found["logprob_error_oracle"] < 1e-4
    assert found["logprob_error_transformers"] < 1e-4
    assert found["bf16_vs_transformers"] <= 1.0
