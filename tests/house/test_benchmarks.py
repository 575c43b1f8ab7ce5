"""The frame that the benchmarks share, and what every benchmark has."""

from __future__ import annotations

import ast
import importlib.util
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from torch import Tensor, nn

from lezero.core import facts, groups
from tests.house.floors import ROOT
from tests.ranks import RankPool

FILES = sorted((ROOT / "benchmarks").glob("[!_]*.py"))


@pytest.fixture
def frame() -> ModuleType:
    return loaded("_table")


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def python(frame: ModuleType, name: str, code: str, **keywords: str) -> object:
    return frame.Side(name, (sys.executable, "-c", code), **keywords)


def test_rounds_are_interleaved_and_turn_round(frame: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import json; open({!r}, 'a').write({!r}); print('noise'); print(json.dumps(dict(s={})))"
    sides = [
        python(frame, name, code.format(str(log), name, s)) for name, s in (("a", 3), ("b", 2))
    ]
    result = frame.compare(sides, rounds=3)
    assert log.read_text() == "abbaab"
    assert result.ratio("s", "a", "b") == 1.5
    head, _, first, second = result.table(["s"], base="b").splitlines()
    assert head.split() == ["side", "s", "×", "b", "rounds"]
    assert first.split() == ["a", "3", "1.500", "3"]
    assert second.split() == ["b", "2", "1.000", "3"]


def test_a_side_that_fails_or_is_missing_is_a_row_that_says_so(frame: ModuleType) -> None:
    sides = [
        python(frame, "good", "print('{\"s\": 1.0}')"),
        python(frame, "bad", "raise ValueError('no such thing')"),
        python(frame, "silent", "pass"),
        python(frame, "absent", "", missing="run `make peers` first"),
    ]
    result = frame.compare(sides, rounds=2)
    table = result.table(["s"], base="good")
    assert "failed: status 1: ValueError: no such thing" in table
    assert "failed: printed no JSON object as its last line" in table
    assert "missing: run `make peers` first" in table
    assert len(result.figures["good"]) == 2


def test_a_side_that_takes_too_long_is_killed_with_all_it_started(frame: ModuleType) -> None:
    hangs, began = frame.Side("ours", ("sh", "-c", "sleep 60; true")), time.monotonic()
    result = frame.compare([hangs], rounds=1, timeout_s=0.5)
    assert result.failed == {"ours": "failed: not done in 0.5 s"}
    assert time.monotonic() - began < 20, "it waited for who holds the pipes"


BENCHMARK = """
import os, sys, time
sys.path.insert(0, {folder!r})
from _table import arguments, compare, side
from _turns import compare_in_turns
if arguments(None).side:
    try:
        print(os.getpid(), file=open({log!r}, "w"), flush=True)
        time.sleep(60)
    finally:
        print("taken down", file=open({log!r}, "a"))
compare{how}([side(__file__, "a")], rounds=1{steps})
"""


@pytest.mark.usefixtures("ctrl_c", "not_under_nohup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize(("how", "steps"), [("", ""), ("_in_turns", ", steps=1")])
def test_a_benchmark_that_is_ended_lets_its_side_take_down_what_it_made(
    how: str, steps: str, number: signal.Signals, tmp_path: Path
) -> None:
    file, log = tmp_path / "benchmark.py", tmp_path / "log"
    folder = str(ROOT / "benchmarks")
    file.write_text(BENCHMARK.format(folder=folder, log=str(log), how=how, steps=steps))
    process = subprocess.Popen([sys.executable, file], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not (log.exists() and log.read_text().endswith("\n")):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(60)
    finally:
        process.kill()
        process.wait()
    side, *said = log.read_text().splitlines()
    assert said == ["taken down"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(side), 0)


def test_a_ratio_is_the_median_of_the_rounds_ratios(frame: ModuleType) -> None:
    rounds = {"a": [1.0, 4.0, 9.0], "b": [1.0, 8.0, 3.0]}
    figures = {name: [{"s": s, "t": 2 * s} for s in found] for name, found in rounds.items()}
    result = frame.Result(figures, {})
    assert result.ratio("s", "a", "b") == 1.0  # of the medians it is 4/3
    assert result.ratio("s", "a", "b", "t") == 0.5


def test_a_failed_side_is_a_failed_benchmark_unless_it_is_a_peer(
    frame: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = frame.Side("peer", ("false",))
    frame.compare([python(frame, "absent", "", missing="no GPU"), peer], rounds=1)
    frame.finish("a table", {"ratio": None})
    frame.compare([python(frame, "ours", "raise ValueError('no such thing')")], rounds=1)
    with pytest.raises(SystemExit, match="ours: status 1: ValueError: no such thing"):
        frame.finish("a table", {"ratio": None})
    assert capsys.readouterr().out.splitlines()[-1] == '{"ratio": null}'


def test_sides_see_the_number_of_threads(frame: ModuleType) -> None:
    code = "import json, os; print(json.dumps(dict(n=int(os.environ['OMP_NUM_THREADS']))))"
    assert frame.compare([python(frame, "a", code)], rounds=1, threads=2).median("a", "n") == 2


def test_the_last_line_is_one_json_object(
    frame: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    frame.finish("a table", {"ratio": 1.23456789, "count": 3, "good": True})
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "ratio": 1.2346,
        "count": 3,
        "good": True,
    }


def test_a_side_that_measures_afresh_leaves_the_users_figures(
    frame: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path))
    (tmp_path / "operations-x.json").touch()
    with frame.nothing_measured():
        assert [path.name for path in facts.cache_folder().iterdir()] == ["native"]
        (facts.cache_folder() / "native" / "built").touch()
    assert facts.cache_folder() == tmp_path
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "built",
        "native",
        "operations-x.json",
    ]


def test_memory_counts_what_is_held(frame: ModuleType) -> None:
    for shared in (False, True):
        memory = frame.Memory(shared)
        with mmap.mmap(-1, 64 << 20) as held:  # malloc might hand out pages that are resident
            for at in range(0, len(held), 4096):
                held[at] = 1
            assert memory.steady() > 60 << 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_benchmark_says_its_claim_and_has_a_quick_form(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source))
    assert "--quick" in source or "arguments(__doc__" in source


def test_a_short_form_passes_only_with_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = loaded("_quick")
    endings = {
        "good": "print('noise'); print({}); print('late', file=sys.stderr)",
        "bad": "print({}); sys.exit(3)",
        "silent": "pass",
        "number": "print(1)",
        "_part": "sys.exit(1)",
    }
    for name, code in endings.items():
        (tmp_path / f"{name}.py").write_text(f"import sys\n{code}\n")
    monkeypatch.setattr(quick, "FOLDER", tmp_path)
    assert quick.main() == 1
    out, err = capsys.readouterr()
    assert "noise" in out
    assert err.splitlines() == [
        "error: bad.py: status 3",
        "error: number.py: its last line is no JSON object",
        "error: silent.py: its last line is not JSON",
    ]


def stages_alike(drifts: bool) -> bool:
    """What the benchmark of ZeRO says; `drifts`: rank 1 has other values at stage 0."""
    from lezero.parallel import zero

    loaded("_table")
    benchmark, whole, stages = loaded("zero"), zero.full_parameters, iter(range(4))

    def drifted(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        apart = drifts and next(stages) == 0 and groups.rank() == 1
        return ((name, tensor + apart) for name, tensor in whole(model))

    with mock.patch.object(zero, "full_parameters", drifted):
        return bool(benchmark.bitwise(1))


def test_stages_are_alike_when_they_are_on_every_rank(ranks: RankPool) -> None:
    assert ranks(2, stages_alike, False) == [True, True]
    assert ranks(2, stages_alike, True) == [False, False]
