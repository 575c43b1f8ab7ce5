"""Measured ceilings are kept per machine; a damaged file is measured again."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lezero.core.errors import FileError
from lezero.profiler import ceilings as module
from lezero.profiler.ceilings import (
    FORMAT,
    Ceilings,
    GemmPoint,
    ReadPoint,
    cache_file,
    cached,
    load,
    store,
)

POINTS = (
    GemmPoint("fp32", 256, 256, 256, "nn", 1e11),
    GemmPoint("fp32", 2048, 512, 2048, "nn", 2e11),
    GemmPoint("fp32", 2048, 512, 2048, "nt", 3e11),
)
READS = (ReadPoint(1 << 22, 9e10), ReadPoint(1 << 26, 5e10), ReadPoint(1 << 30, 2e10))
GOOD = Ceilings(
    device="cpu",
    threads=2,
    torch="2.13.0",
    gemm_fp32=3e11,
    memory_read=2e10,
    gemm_curve=POINTS,
    read_curve=READS,
    attention={"fp32_forward": 1e10},
    elementwise={"gelu_fp32": 2e9},
    failed={"gemm_int8": "not implemented"},
)


OLD = {name: value for name, value in GOOD.to_dict().items() if name != "read_curve"}


class Measure:
    def __init__(self, result: Ceilings = GOOD) -> None:
        self.calls, self.result = 0, result

    def __call__(self) -> Ceilings:
        self.calls += 1
        return self.result


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "ceilings.json"
    store(path, GOOD)
    assert load(path) == GOOD
    assert os.listdir(path.parent) == ["ceilings.json"], "nothing is left aside"
    assert json.loads(path.read_text())["format"] == FORMAT


@pytest.mark.parametrize(
    ("size", "rate"),
    [(1 << 22, 9e10), (1 << 25, 9e10), (1 << 26, 5e10), (1 << 29, 5e10), (1 << 34, 2e10)],
)
def test_reads_are_as_fast_as_those_of_as_many_or_fewer_bytes(size: int, rate: float) -> None:
    assert GOOD.read_at_most(size) == rate


def test_reads_of_fewer_bytes_than_were_measured_and_without_a_curve() -> None:
    assert GOOD.read_at_most(1 << 20) == 9e10
    assert replace(GOOD, read_curve=()).read_at_most(1 << 26) == 2e10
    rising = (ReadPoint(1, 5e10), *READS)
    assert replace(GOOD, read_curve=rising).read_at_most(2) == 9e10, "at most is what more reach"


def test_measured_once_then_kept_and_refreshed_on_demand(tmp_path: Path) -> None:
    path, measure = tmp_path / "c.json", Measure()
    assert cached(path, measure) == cached(path, measure) == GOOD
    assert measure.calls == 1
    measure.result = replace(GOOD, gemm_fp32=4e11)
    assert cached(path, measure, refresh=True).gemm_fp32 == 4e11
    assert cached(path, measure).gemm_fp32 == 4e11
    assert measure.calls == 2


def test_the_key_is_machine_device_and_threads(tmp_path: Path) -> None:
    keys = {
        cache_file("a", "cpu", 2, tmp_path),
        cache_file("b", "cpu", 2, tmp_path),
        cache_file("a", "cuda:0", 2, tmp_path),
        cache_file("a", "cpu", 4, tmp_path),
    }
    assert len(keys) == 4
    assert cache_file("a", "cuda:0", 2, tmp_path) == cache_file("a", "cuda:1", 2, tmp_path)


def damaged() -> dict[str, Any]:
    whole = {"format": FORMAT, "ceilings": GOOD.to_dict()}
    return {
        "empty": "",
        "torn": json.dumps(whole)[:-40],
        "not an object": "[1, 2]",
        "another format": {**whole, "format": FORMAT + 1},
        "no ceilings": {"format": FORMAT},
        "unknown field": {"format": FORMAT, "ceilings": {**GOOD.to_dict(), "colour": "red"}},
        "text for a number": {
            "format": FORMAT,
            "ceilings": {**GOOD.to_dict(), "gemm_fp32": "fast"},
        },
        "negative": {"format": FORMAT, "ceilings": {**GOOD.to_dict(), "memory_read": -1.0}},
        "not finite": {
            "format": FORMAT,
            "ceilings": {**GOOD.to_dict(), "disk_write": float("inf")},
        },
        "bad point": {"format": FORMAT, "ceilings": {**GOOD.to_dict(), "gemm_curve": [{"m": 1}]}},
        **{
            f"bad read {number}": {
                "format": FORMAT,
                "ceilings": {**GOOD.to_dict(), "read_curve": points},
            }
            for number, points in enumerate(
                (
                    [{"size": -4, "bytes_per_s": 1e9}],
                    [{"size": 0, "bytes_per_s": 1e9}],
                    [{"size": 4, "bytes_per_s": -1e9}],
                    [{"size": 4, "bytes_per_s": float("nan")}],
                    [{"size": 4, "bytes_per_s": 10**400}],
                    [{"size": True, "bytes_per_s": 1e9}],
                    [{"size": 8, "bytes_per_s": 1e9}, {"size": 4, "bytes_per_s": 1e9}],
                    [{"size": 8, "bytes_per_s": 1e9}, {"size": 8, "bytes_per_s": 1e9}],
                )
            )
        },
        "of before": {"format": 1, "ceilings": OLD},
        "bad mapping": {"format": FORMAT, "ceilings": {**GOOD.to_dict(), "elementwise": [1]}},
        "bad rate": {"format": FORMAT, "ceilings": {**GOOD.to_dict(), "attention": {"x": None}}},
        "nested": "[" * 100_000,
        "binary": b"\xff\xfe\x00",
    }


@pytest.mark.parametrize("name", damaged())
def test_a_damaged_file_is_measured_again_and_replaced(tmp_path: Path, name: str) -> None:
    content = damaged()[name]
    path, measure = tmp_path / "c.json", Measure()
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert load(path) is None
    assert cached(path, measure) == GOOD
    assert measure.calls == 1
    assert load(path) == GOOD


def test_a_folder_that_cannot_be_written_costs_a_warning_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert cached(tmp_path / "file" / "c.json", Measure()) == GOOD
    assert "cannot be written" in capsys.readouterr().err + caplog.text


def test_two_at_once_measure_once(tmp_path: Path) -> None:
    path, measure = tmp_path / "c.json", Measure()

    def slowly() -> Ceilings:
        time.sleep(0.2)
        return measure()

    results: list[Ceilings] = []
    threads = [
        threading.Thread(target=lambda: results.append(cached(path, slowly))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [GOOD] * 3
    assert measure.calls == 1


def test_disturbed_figures_are_replaced_when_the_machine_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measure = tmp_path / "c.json", Measure()
    store(path, replace(GOOD, cpu_share=0.4, gemm_fp32=1e9))
    monkeypatch.setattr(module.os, "getloadavg", lambda: (3.0, 3.0, 3.0))
    assert cached(path, measure).disturbed
    monkeypatch.setattr(module.os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    assert cached(path, measure) == GOOD
    assert measure.calls == 1


def test_the_nearest_measured_product_answers() -> None:
    assert GOOD.gemm_at("fp32", 4096, 512, 2048) == 2e11
    assert GOOD.gemm_at("fp32", 4096, 512, 2048, "nt") == 3e11
    assert GOOD.gemm_at("fp32", 100, 100, 100) == 1e11
    assert GOOD.gemm_at("bf16", 64, 64, 64) is None
    assert GOOD.gemm("fp32") == 3e11
    assert POINTS[0].flops == 2 * 256**3


def test_a_foreign_record_is_refused() -> None:
    with pytest.raises(FileError):
        Ceilings.from_dict({"device": "cpu"})
    with pytest.raises(FileError):
        Ceilings.from_dict(None)
