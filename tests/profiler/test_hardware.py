"""`lz.hardware()`: facts and kept ceilings together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lezero.profiler.measure as measure_module
from lezero.core.errors import LeZeroError
from lezero.profiler import Hardware, hardware
from lezero.profiler.ceilings import Ceilings

FIGURES = Ceilings(device="cpu", threads=2, torch="2.13.0", gemm_fp32=1e11)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The thread counts that were measured."""
    seen: list[int] = []

    def fake(threads: int) -> Ceilings:
        seen.append(threads)
        return FIGURES

    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path))
    monkeypatch.setattr(measure_module, "measure_apart", fake)
    return seen


def test_measured_on_first_use_and_on_demand(calls: list[int]) -> None:
    assert hardware(measure=False).ceilings is None
    found = hardware()
    assert isinstance(found, Hardware)
    assert found.ceilings == FIGURES
    assert hardware().ceilings == hardware(measure=False).ceilings == FIGURES
    assert len(calls) == 1
    hardware(refresh=True)
    assert calls == [torch.get_num_threads()] * 2
    json.dumps(found.to_dict())


def test_another_thread_count_is_another_measurement(calls: list[int]) -> None:
    kept = torch.get_num_threads()
    try:
        hardware()
        torch.set_num_threads(kept + 1)
        hardware()
    finally:
        torch.set_num_threads(kept)
    assert calls == [kept, kept + 1]


def test_a_failed_measurement_is_a_warning(
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(threads: int) -> Ceilings:
        raise LeZeroError("measuring the ceilings failed: signal 4")

    monkeypatch.setattr(measure_module, "measure_apart", fail)
    found = hardware()
    assert found.ceilings is None
    assert found.facts.cpu.usable >= 1
    assert "signal 4" in capsys.readouterr().err + caplog.text


def test_the_function_survives_the_import_of_its_module() -> None:
    import lezero.profiler.hardware

    assert lezero.profiler.hardware is hardware
