"""Fixtures of every test: nothing is left behind, and a warm pool of ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import leaks
from tests.ranks import RankPool

os.environ["HF_HUB_OFFLINE"] = "1"
_session_folder = ""


def pytest_configure(config: pytest.Config) -> None:
    global _session_folder
    _session_folder = leaks.start_session()


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_session_folder, ignore_errors=True)


# Files that take longest go to workers first, so that none is left alone with one at the end.
LONGEST = (
    "parallel/zero/test_models", "serve/test_exact", "train/test_resume", "examples/test_examples",
    "train/test_zero", "train/test_speed", "train/test_trainer", "jobs/test_verify",
    "cli/test_train", "train/test_signals", "models/test_gguf", "serve/server/test_run",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.relative_to(Path(__file__).parent).with_suffix("").as_posix()
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a process, thread, file or environment variable behind."""
    before = leaks.Snapshot.take()
    yield
    found = before.leaks()
    if found:
        pytest.fail("the test left behind: " + "; ".join(found), pytrace=False)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(2, function, *args)` runs a function of the test's module in two Gloo ranks."""
    with RankPool() as pool:
        yield pool
