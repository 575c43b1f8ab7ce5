"""The doctor's built-in checks: each one's findings, and the conformance of all."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lezero.jobs.doctor  # noqa: F401  (registers the checks)
from lezero.core import facts as core_facts
from lezero.core.checks import Context, Finding, checks
from lezero.jobs.ceiling_checks import CeilingsCheck
from lezero.profiler.ceilings import Ceilings
from tests.core.check_conformance import TORCH, CheckConformance, machine

FIGURES = Ceilings(
    device="cpu",
    threads=2,
    torch="2.13.0",
    gemm_fp32=170e9,
    gemm_bf16=400e9,
    memory_read=26e9,
    disk_write=3e8,
)


@pytest.mark.parametrize("name", checks.names())
class TestEveryBuiltInCheck(CheckConformance):
    @pytest.fixture(autouse=True)
    def _member(self, name: str) -> None:
        # one imports a package, from a disk that may be cold
        type(self).seconds = 60.0 if name == "torchvision" else 5.0
        type(self).check = checks.get(name)


def ceilings_finding(**changes: Any) -> list[Finding]:
    cpu = replace(core_facts.cpu(), instruction_sets=("avx2", "avx512f", "avx512_bf16"))
    facts = replace(machine(), cpu=cpu)
    context = Context(facts=facts, torch=TORCH, ceilings=replace(FIGURES, **changes))
    return CeilingsCheck().run(context)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "as expected"),
        ({"gemm_fp32": 2e9}, "fp32 products reach only 2.00 GFLOP/s"),
        ({"gemm_bf16": 150e9}, "no faster than fp32"),
        ({"memory_read": 4e8}, "memory reads at only 400 MB/s"),
        ({"cpu_share": 0.5, "gemm_fp32": 2e9}, "beside other programs"),
        ({"gemm_fp32": None, "failed": {"gemm_fp32": "no"}}, "could not be measured: gemm_fp32"),
    ],
)
def test_figures_that_do_not_fit_the_processor(changes: dict[str, Any], expected: str) -> None:
    found = ceilings_finding(**changes)
    assert len(found) == 1
    assert expected in found[0].title


def findings_of(name: str, **changes: Any) -> list[Finding]:
    """What one built-in check says of this machine with some facts changed."""
    read = machine()
    parts = {key: changes.pop(key) for key in ("cpu", "memory") if key in changes}
    read = replace(read, **{key: replace(getattr(read, key), **v) for key, v in parts.items()})
    top = {
        key: changes.pop(key)
        for key in ("accelerators", "driver", "compilers", "versions")
        if key in changes
    }
    torch = {**TORCH, **changes.pop("torch", {})}
    return checks.get(name)().run(Context(facts=replace(read, **top), torch=torch, **changes))


GPU = core_facts.Accelerator("cuda", "cuda", 0, "A GPU", 80 << 30, "9.0")
CODEC = {"name": "codec", "kernel": "avx2", "problem": "", "otherwise": "codecs run slowly"}
NO_CODEC = {**CODEC, "kernel": ""}
TWO = (NO_CODEC, {**NO_CODEC, "name": "adamw"})
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("native-ops", {"torch": {"native": [CODEC]}}, "ok", "native ops: codec (avx2)"),
    ("native-ops", {"torch": {"native": [NO_CODEC]}}, "note", "no kernel of 'codec' suits"),
    (
        "native-ops",
        {"torch": {"native": [{**NO_CODEC, "problem": "no C compiler found"}]}},
        "warning",
        "the kernel of 'codec' cannot be built: codecs run slowly",
    ),
    (
        "native-ops",
        {"torch": {"native": [{**x, "problem": "cannot keep it in /x (no)"} for x in TWO]}},
        "warning",
        "the kernels of 'codec', 'adamw' cannot be built: codecs run slowly",
    ),
    ("native-ops", {"torch": {"native_error": "SIGILL"}}, "warning", "ends the process"),
    ("cores", {"cpu": {"usable": 1, "quota": 1.0}}, "warning", "2 threads on 1 usable"),
    (
        "cores",
        {
            "cpu": {"usable": 2},
            "torch": {"threads": 8},
            "environment": {"OMP_NUM_THREADS": "8"},
        },
        "warning",
        "8 threads",
    ),
    ("cores", {"cpu": {"usable": 2, "logical": 64}}, "note", "2 of the machine's 64 cores"),
    (
        "cores",
        {"cpu": {"usable": 4, "logical": 4}, "environment": {"OMP_NUM_THREADS": "2"}},
        "note",
        "2 of 4 usable",
    ),
    ("memory", {"memory": {"limit": 2 << 30}}, "warning", "only 2.00 GiB"),
    ("memory", {"memory": {"total": 64 << 30, "limit": 8 << 30}}, "note", "limited to 8.00 GiB"),
    ("memory", {"memory": {"available": 1 << 20}}, "warning", "is free"),
    ("shared-memory", {"memory": {"shared": 64 << 20}}, "warning", "64.0 MiB free in /dev/shm"),
    ("huge-pages", {"memory": {"huge_pages": "never"}}, "note", "switched off"),
    ("precision", {"cpu": {"instruction_sets": ("avx2",)}}, "note", "bf16 is not native"),
    ("accelerator", {"driver": "570.1"}, "warning", "CPU build"),
    ("accelerator", {"driver": "570.1", "torch": {"cuda": "12.8"}}, "warning", "finds no device"),
    ("accelerator", {"driver": "", "torch": {"cuda": "12.8"}}, "note", "on the processor"),
    ("accelerator", {"accelerators": (GPU,)}, "ok", "1 x A GPU"),
    ("accelerator", {"accelerators": (GPU, GPU)}, "warning", "no NCCL"),
    ("collectives", {"torch": {"backends": []}}, "warning", "several ranks"),
    ("compiler", {"compilers": {}}, "warning", "no g++"),
    ("compiler", {"compilers": {"clang++": "clang 16"}}, "warning", "no g++"),
    ("compiler", {"environment": {"CXX": "false"}}, "warning", "CXX=false compiles no C++"),
    ("compiler", {"environment": {"CXX": "true"}}, "warning", "CXX=true compiles no C++"),
    ("compiler", {"environment": {"CXX": "no g++"}}, "warning", "CXX=no g++ compiles no C++"),
    ("compiler", {"environment": {"CXX": ""}}, "warning", "CXX= compiles no C++"),
    ("torch", {"torch": {"version": "2.10.1"}}, "broken", "2.10.1 is too old"),
    ("torch", {"torch": {"computes": False}}, "broken", "comes out wrong"),
    ("torch", {"torch": {"numpy": False}}, "broken", "numpy do not work"),
    ("torch", {"torch": {"version": "3.0.0a0+git12"}}, "ok", "3.0.0a0"),
]


@pytest.mark.parametrize(("name", "changes", "severity", "title"), CASES)
def test_what_each_check_says(
    name: str, changes: dict[str, Any], severity: str, title: str
) -> None:
    found = [item for item in findings_of(name, **dict(changes)) if item.severity == severity]
    assert [item for item in found if title in item.title], found


def test_little_room_and_a_slow_disk_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints go where the user stands, figures into the cache folder."""
    free = {Path.cwd(): 1 << 30, tmp_path: 3 << 30}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=free[Path(path).absolute()])
    )
    given: dict[str, Any] = {"cache": tmp_path, "ceilings": SimpleNamespace(disk_write=40e6)}
    room, slow = findings_of("disk", **given)
    assert (room.severity, slow.severity) == ("warning", "note")
    assert room.title == "only 1.00 GiB of disk is free"
    assert "writes only 40" in slow.title
    free[Path.cwd()] = 3 << 30
    given["ceilings"] = SimpleNamespace(disk_write=60e6)
    assert [found.severity for found in findings_of("disk", **given)] == ["ok"]


def test_a_variable_with_a_bad_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEZERO_POOL", "perhaps")
    (found,) = findings_of("environment")
    assert (found.severity, found.fix) == ("broken", "unset LEZERO_POOL")


def test_a_required_package_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (found,) = findings_of("packages")
    assert found.severity == "broken"
    assert found.title.startswith("safetensors")


def test_a_torchvision_that_does_not_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = findings_of("torchvision", versions={"torchvision": "0.28.0"})
    assert found.severity == "broken"
    assert "uninstall -y torchvision" in found.fix
    (tmp_path / "torchvision.py").write_text("")
    assert findings_of("torchvision", versions={"torchvision": "0.28.0"})[0].severity == "ok"


def test_a_compiler_is_one_that_answers_as_one(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho '#define __cplusplus 201703L'")
    compiler.chmod(0o755)
    found = findings_of("compiler", compilers={}, environment={"CXX": str(compiler)})
    assert not [item for item in found if "compiles no C++" in item.title]
    compiler.write_text("#!/bin/sh\necho cannot find cc1plus >&2; exit 1")
    found = findings_of("compiler", compilers={}, environment={"CXX": str(compiler)})
    assert (found[0].severity, found[0].fix) == ("warning", "unset CXX")
