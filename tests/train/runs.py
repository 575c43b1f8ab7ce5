"""Small runs for tests: text, a config, and a cache whose ceilings need not be measured."""

from __future__ import annotations

import itertools
import json
import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lezero.core import device, facts
from lezero.plan import measure
from lezero.profiler import ceilings
from lezero.train import RunConfig
from tests.leaks import own_cache

TEXT = "\n\n".join(pydoc_data.topics.topics.values())[:30_000]


@pytest.fixture(scope="session")
def filled_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds ceilings for one and two threads, here and without accelerator."""
    folder = own_cache(tmp_path_factory.mktemp("cache"))
    ids = {facts.machine_id(), facts.facts(accelerators=()).machine_id}
    kinds = {"cpu", device.device().type}
    for machine, kind, threads in itertools.product(ids, kinds, (1, 2)):
        made = ceilings.Ceilings(
            device=kind, threads=threads, torch=torch.__version__,
            gemm_fp32=1e11, gemm_bf16=1e12, gemm_fp16=1e11, memory_read=1e10, memory_copy=1e10,
        )  # fmt: skip
        ceilings.store(ceilings.cache_file(machine, kind, threads, folder), made)
    return folder


@pytest.fixture
def measured_machine(filled_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that a test starts find the filled cache, and so take ten seconds less."""
    monkeypatch.setenv("LEZERO_CACHE", str(filled_cache))


@pytest.fixture(scope="module")
def one_thread(filled_cache: Path) -> Iterator[None]:
    """One thread, here and in the processes that a test starts, and the filled cache.

    A forecast keeps what it measured beside other tests too, instead of waiting for a quiet moment.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEZERO_CACHE", str(filled_cache))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(measure, "_waiting", dict)
        yield
    torch.set_num_threads(before)


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of 20 steps in `folder`/run. `changes`: "section__key" = value, or a whole section."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT, encoding="utf-8")
    made: dict[str, Any] = {
        "run": str(folder / "run"),
        "model": {"layers": 2, "dim": 32, "heads": 2},
        "data": {"train": [str(text)], "tokenizer": "bytes", "sequence": 32},
        "train": {"steps": 20, "batch": 8, "lr": 3e-3, "precision": "fp32", "compile": "off"},
        "validation": {"every": 10, "batches": 2},
        "checkpoint": {"every": 5},
        "report": {"sample_tokens": 4},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            made[section][name] = value
        else:
            made[section] = value
    return made


def config(folder: Path, **changes: Any) -> RunConfig:
    return RunConfig.parse(settings(folder, **changes), "test")


def write_config(folder: Path, name: str = "config.yaml", **changes: Any) -> Path:
    """The same as a file, for the command line."""
    path = folder / name
    path.write_text(json.dumps(settings(folder, **changes)), encoding="utf-8")
    return path
