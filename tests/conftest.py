"""Fixtures of every test: nothing is left behind, and a warm pool of ranks."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator

import pytest
import torch

from lezero.core import device
from tests import leaks
from tests.ranks import HIDDEN, RankPool

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("PYTHONUNBUFFERED", None)  # or lines that wait in a buffer would be seen at once
_session_folder = ""


def pytest_configure(config: pytest.Config) -> None:
    global _session_folder
    _session_folder = leaks.start_session()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # each collection of the tests' own garbage would look through all that is loaded


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_session_folder, ignore_errors=True)


def hide_accelerators(patch: pytest.MonkeyPatch) -> None:
    for name, value in HIDDEN.items():
        patch.setenv(name, value)
    patch.setattr(device, "accelerator", lambda: None)


@pytest.fixture(autouse=True)
def the_same_numbers_each_time() -> None:
    """Whatever ran before: a failure of a draw can be seen again."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a process, thread, file or environment variable behind."""
    before = leaks.Snapshot.take()
    yield
    found = before.leaks()
    if found:
        pytest.fail("the test left behind: " + "; ".join(found), pytrace=False)


@pytest.fixture
def without_accelerator(nothing_left_behind: None) -> Iterator[None]:
    """This machine's accelerators are hidden, here and in the processes that the test starts."""
    with pytest.MonkeyPatch.context() as patch:
        hide_accelerators(patch)
        yield


@pytest.fixture
def not_under_nohup() -> Iterator[None]:
    """Whatever the tests run under: an ignored SIGHUP is inherited by whom they start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def where_its_ranks_compute(request: pytest.FixtureRequest) -> None:
    """A test with ranks computes on the processor, as they do."""
    if "ranks" in request.fixturenames:
        request.getfixturevalue("without_accelerator")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(2, function, *args)` runs a function of the test's module in two Gloo ranks."""
    with RankPool() as pool:
        yield pool


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as in a terminal: what runs in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
