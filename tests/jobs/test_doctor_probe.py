"""A broken torch never reaches the process that asks about it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from lezero.jobs import doctor_probe
from lezero.jobs.doctor import diagnose
from lezero.jobs.doctor_probe import probe

FAKES = {
    "raises": ("raise ImportError('libcudart.so.13: cannot open')", "libcudart.so.13"),
    "aborts": ("import os; os.abort()", "SIGABRT"),
    "illegal instruction": ("import os; os.kill(os.getpid(), 4)", "SIGILL"),
    "exits": ("raise SystemExit(0)", "status 0"),
    "exits loudly": ("import sys; print('boom', file=sys.stderr); sys.exit(3)", "boom"),
    "is empty": ("", "has no attribute"),
    "is missing": ("raise ModuleNotFoundError(\"No module named 'torch'\")", "No module named"),
}


def fake(folder: Path, package: str, body: str) -> Path:
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text(body)
    return folder


@pytest.mark.parametrize("name", FAKES)
def test_a_torch_that_cannot_be_imported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, reason = FAKES[name]
    monkeypatch.syspath_prepend(str(fake(tmp_path, "torch", body)))
    found = diagnose(quick=True)
    (item,) = [item for item in found.having("broken") if item.check == "torch"]
    assert reason in item.finding.cause
    assert "pip install" in item.finding.fix
    assert found.facts.cpu.usable >= 1, "the rest is told all the same"


def test_a_torch_that_never_ends_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(fake(tmp_path, "torch", "import time; time.sleep(60)")))
    assert "longer than 1 s" in probe(timeout_s=1.0).error


def test_an_answer_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def odd(command: list[str], **keywords: Any) -> Any:
        return real([command[0], "-c", "print('lezero-probe:{')"], **keywords)

    monkeypatch.setattr(doctor_probe.subprocess, "run", odd)
    assert "cannot be read" in probe().error

    def none(command: list[str], **keywords: Any) -> Any:
        raise FileNotFoundError("python")

    monkeypatch.setattr(doctor_probe.subprocess, "run", none)
    assert "cannot be started" in probe().error


def answering(*lines: str, status: int = 0, late: bool = False) -> Any:
    """A stand-in for the asking process."""
    said = "\n".join(lines)

    def run(command: list[str], **keywords: Any) -> Any:
        if late:
            raise subprocess.TimeoutExpired(command, 1.0, output=said.encode())
        return subprocess.CompletedProcess(command, status, said, "cc1: killed\n")

    return run


TORCH = 'lezero-probe:{"version": "2.13.0", "accelerators": []}'
NATIVE = 'lezero-native:[{"name": "codec", "kernel": "avx2", "problem": "", "otherwise": ""}]'


def test_native_ops_are_told_and_cannot_hide_what_torch_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor_probe.subprocess, "run", answering(TORCH, NATIVE))
    assert probe().torch["native"][0]["kernel"] == "avx2"
    for broken in (answering(TORCH, status=-4), answering(TORCH, late=True)):
        monkeypatch.setattr(doctor_probe.subprocess, "run", broken)
        found = probe()
        assert found.torch["version"] == "2.13.0"
        assert "native" not in found.torch
    monkeypatch.setattr(doctor_probe.subprocess, "run", answering(TORCH, status=-4))
    assert "SIGILL" in probe().torch["native_error"]


def test_this_machine_tells_of_each_native_op() -> None:
    names = [op["name"] for op in probe().torch["native"]]
    assert {"attention", "codec"} <= set(names)
