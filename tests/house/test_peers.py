"""The set-up of what the benchmarks compare with."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.house.floors import ROOT


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "peers/install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PYTHON", Path(sys.executable))
    return module


@pytest.mark.parametrize("broken", ["", "onnx"])
def test_a_peer_that_fails_is_told_and_tried_again(
    broken: str, install: ModuleType, monkeypatch: Any, capsys: Any
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], env: Any = None) -> str:
        ran.append(command)
        return "no such wheel" if broken and broken in command else ""

    monkeypatch.setattr(install, "_run", run)
    assert install.main("https://an.index") == bool(broken), "whether make asks for it again"
    told = capsys.readouterr().out
    assert told.count(" ready") == len(install.peers()) - bool(broken)
    assert ("onnx         missing: no such wheel" in told) == bool(broken)
    (of_torch,) = [command for command in ran if "--index-url" in command]
    assert of_torch[of_torch.index("--index-url") + 1] == "https://an.index"
    assert of_torch[-1] == "torch"


def test_what_comes_first_has_a_tested_version(install: ModuleType) -> None:
    lines = (ROOT / "peers" / "constraints.txt").read_text().splitlines()
    names = {line.partition("==")[0] for line in lines}
    assert {*install.FIRST, "torch"} <= names
