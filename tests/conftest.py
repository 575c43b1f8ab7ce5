"""Fixtures of every test: nothing is left behind, and a warm pool of ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

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
