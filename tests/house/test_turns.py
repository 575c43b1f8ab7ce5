"""Benchmarks whose sides take their steps in turns."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.house.floors import ROOT

SIDE = """
import json, sys
sys.path.insert(0, {folder!r})
from _table import emit
from _turns import turns
print("noise")
taken = 0
for _ in turns():
    taken += 1
    print("more noise")
    open({log!r}, "a").write({name!r})
    {then}
emit(taken=taken)
"""

RANK = "import subprocess; subprocess.run(['sleep', '60'])"
"""Holds the pipes of the side that started it."""


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import _turns

    return _turns


def player(turned: ModuleType, log: Path, name: str, then: str = "pass") -> object:
    folder = str(ROOT / "benchmarks")
    code = SIDE.format(folder=folder, log=str(log), name=name, then=then)
    return turned.Side(name, (sys.executable, "-c", code))


def test_steps_are_taken_in_turns_that_turn_round(turned: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = turned.compare_in_turns(
        [player(turned, log, "a"), player(turned, log, "b")], rounds=2, steps=3
    )
    assert log.read_text() == "abbaab" + "baabba"
    assert result.figures == {"a": [{"taken": 3}] * 2, "b": [{"taken": 3}] * 2}


def test_a_side_that_cannot_run_is_a_row_that_says_so(turned: ModuleType, tmp_path: Path) -> None:
    absent = turned.Side("x", ("nothing",), missing="make peers")
    sides = [player(turned, tmp_path / "log", "a"), absent]
    result = turned.compare_in_turns(sides, rounds=1, steps=1)
    assert result.failed == {"x": "missing: make peers"}
    assert result.figures["a"] == [{"taken": 1}]


def test_a_side_that_dies_or_hangs_says_so_and_holds_up_nobody(
    turned: ModuleType, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    sides = [
        player(turned, log, "a"),
        player(turned, log, "d", "if taken == 2: raise ValueError('no more')"),
        player(turned, log, "h", f"if taken == 2: {RANK}"),
    ]
    result = turned.compare_in_turns(sides, rounds=2, steps=3, timeout_s=2)
    assert result.figures["a"] == [{"taken": 3}] * 2
    assert "status 1: ValueError: no more" in result.failed["d"]
    assert "status -15" in result.failed["h"]
    table = result.table(["taken"])
    assert "ValueError: no more" in table
