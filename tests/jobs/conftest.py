"""Tiny runs for `verify`: pairs of unequal length, so that each micro-batch counts other tokens."""

import json
import random

import pytest
import torch

from tests.jobs.verify_runs import make
from tests.leaks import own_cache


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    draw = random.Random(0)
    lines = []
    for _ in range(60):
        words = [draw.choice(["lorem", "ipsum", "dolor", "sit"]) for _ in range(9)]
        cut = draw.randint(1, 8)
        pair = {"prompt": " ".join(words[:cut]), "response": " ".join(words[cut:])}
        lines.append(json.dumps(pair))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    own_cache(folder / "cache")
    return folder


@pytest.fixture
def run(text, monkeypatch, tmp_path):
    """`run(**train)` makes a config. On one thread: these sizes only lose by a second one."""
    monkeypatch.setenv("LEZERO_CACHE", str(text / "cache"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda **train: make(text, tmp_path, **train)
    torch.set_num_threads(before)
