"""The runs that the tests of `verify` are about, and one as a rank sees it."""

import pytest
import torch

from lezero.jobs.verify import verify
from lezero.train import RunConfig

STEPS = 4


def make(text, run, zero=None, wire=None, **train):
    sections = {"zero": zero} if zero else {}
    sections |= {"wire": wire} if wire else {}
    return RunConfig.parse(
        {
            **sections,
            "run": str(run / "run"),
            "model": {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "tied": False},
            "data": {
                "train": [str(text / "pairs.jsonl")], "validation": 0, "tokenizer": "bytes",
                "sequence": 48, "seed": 3,
            },
            "train": {
                "steps": 20, "batch": 4, "accumulate": 2, "lr": 1e-3, "clip": 1.0,
                "compile": "off", "precision": "fp32", "pool": False, **train,
            },
        }
    )  # fmt: skip


def rank_verifies(text, folder, fault, steps, **train):
    if fault is not None:
        fault(pytest.MonkeyPatch())  # a rank is a process of its own and ends after this
    found = verify(make(text, folder, **train), steps)
    return found.verdict, str(found.first), found.ranks, found.resume, found.form


def rank_verifies_each(text, folder, cases, steps):
    """(verdict, where it parts first, its table) of each (fault, config) on two ranks."""
    torch.set_num_threads(1)
    told = []
    for fault, config in cases:
        with pytest.MonkeyPatch.context() as patch:
            if fault is not None:
                fault(patch)
            found = verify(make(text, folder, **config), steps)
        told.append((found.verdict, str(found.first), found.table()))
    return told
