"""Where Triton cannot compile, a line of the log says why, once, and plain PyTorch runs."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lezero import ops
from lezero.ops import triton_runs as found

GPU = torch.device("cuda", 1)


class Current(AbstractContextManager[None]):
    """The current device."""

    index: int | None = 0

    def __init__(self, index: int | None) -> None:
        self.now = index

    def __enter__(self) -> None:
        Current.index = self.now

    def __exit__(self, *_: object) -> None:
        Current.index = 0


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    finds = importlib.util.find_spec
    monkeypatch.setattr(
        *(importlib.util, "find_spec"),
        lambda name, *rest: name == "triton" or finds(name, *rest),
    )
    monkeypatch.setattr(torch.accelerator, "device_index", Current)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda place: None)
    found._compiles.cache_clear()
    yield
    found._compiles.cache_clear()


def stand_in(monkeypatch: pytest.MonkeyPatch, *problems: Exception) -> list[torch.device]:
    asked: list[torch.device] = []

    def try_out(place: torch.device) -> None:
        assert Current.index == place.index
        assert not isinstance(torch.empty(1), FakeTensor)
        asked.append(place)
        for problem in problems:
            raise problem

    units: Any = SimpleNamespace(try_out=try_out)
    monkeypatch.setitem(sys.modules, "lezero.ops.triton_units", units)
    monkeypatch.setattr(ops, "triton_units", units, raising=False)
    return asked


def test_a_small_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch)
    with FakeTensorMode():
        assert found.triton_runs(GPU)
    assert found.triton_runs(GPU)
    assert asked == [GPU]
    assert not found.triton_runs(torch.device("cpu"))


@pytest.mark.parametrize(
    "problem",
    [
        subprocess.CalledProcessError(1, ["gcc", "cuda_utils.c"]),
        RuntimeError("Failed to find C compiler\nhere"),
    ],
)
def test_what_stands_in_the_way_is_said_once(
    problem: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = stand_in(monkeypatch, problem)
    with caplog.at_level(logging.WARNING, "lezero.ops"):
        assert not found.triton_runs(GPU)
        assert not found.triton_runs(GPU)
    assert len(asked) == 1
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"Triton does not compile on cuda:1 ({type(problem).__name__}: " in said
    assert "python3-dev" in said
    assert "\n" not in said
