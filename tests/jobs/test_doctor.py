"""The doctor tells what is wrong and never falls ill itself, whatever is broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lezero.core import facts as core_facts
from lezero.core.checks import Check, Context, Finding
from lezero.core.errors import LeZeroError
from lezero.core.registry import Registry
from lezero.jobs import doctor as module
from lezero.jobs import doctor_view, software_checks
from lezero.jobs.doctor import Diagnosis, diagnose, summary_lines
from lezero.jobs.doctor_probe import Probe
from lezero.profiler.ceilings import Ceilings
from tests.core.check_conformance import TORCH
from tests.jobs.test_doctor_probe import fake
from tests.leaks import own_cache

ROOT = Path(__file__).parents[2]
FIGURES = Ceilings(
    device="cpu",
    threads=2,
    torch="2.13.0",
    measured_at="2026-11-21T10:00:00+00:00",
    gemm_fp32=170e9,
    gemm_bf16=400e9,
    memory_read=26e9,
    disk_write=3e8,
    op_overhead=1e-6,
)


def well() -> Probe:
    return Probe(torch=dict(TORCH))


def diagnosed(**changes: Any) -> Diagnosis:
    """A diagnosis of this machine, with a good torch and good figures unless told otherwise."""
    return diagnose(**{"ask": well, "measure": lambda *_: FIGURES, **changes})


def only(*members: type[Check]) -> Registry[type[Check]]:
    own: Registry[type[Check]] = Registry("test check", Check)
    for number, member in enumerate(members):
        own.register(f"{number}-{member.__name__}")(member)
    return own


class Good(Check):
    """A check that is content."""

    def run(self, context: Context) -> list[Finding]:
        return [Finding(severity="ok", title="good")]


def test_the_whole_thing_is_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path))
    found = diagnosed()
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["format"] == 1
    assert data["ceilings"]["gemm_fp32"] == 170e9
    assert data["facts"]["cpu"]["usable"] >= 1
    assert {"check", "severity", "title", "cause", "fix"} == set(data["findings"][0])
    assert not found.broken
    assert found.exit_status == 0


def test_the_worst_comes_first() -> None:
    class Bad(Check):
        """A check that is not content."""

        def run(self, context: Context) -> list[Finding]:
            told = {"cause": "Because.", "fix": "true"}
            return [
                Finding(severity="note", title="a note"),
                Finding(severity="broken", title="it broke", **told),
                Finding(severity="warning", title="it creaks", **told),
            ]

    found = diagnosed(registry=only(Good, Bad), quick=True)
    severities = [item.finding.severity for item in found.findings]
    assert severities == ["broken", "warning", "note", "ok"]
    assert found.broken
    assert found.exit_status == 1
    assert doctor_view.closing(found) == "1 thing broken, 1 warning, 1 good"


@pytest.mark.parametrize(
    ("raises", "cause"),
    [
        (RuntimeError("two\nlines"), "RuntimeError: two"),
        (SystemExit(0), "SystemExit: 0"),
        (RecursionError(), "RecursionError: no message"),
    ],
)
def test_a_check_that_raises_is_a_finding_and_the_others_go_on(
    raises: BaseException, cause: str
) -> None:
    class Raising(Check):
        """A check that falls over."""

        def run(self, context: Context) -> list[Finding]:
            raise raises

    found = diagnosed(registry=only(Raising, Good), quick=True)
    assert [item.finding.severity for item in found.findings] == ["broken", "ok"]
    assert found.findings[0].finding.cause == cause
    assert "0-Raising" in found.findings[0].finding.title


@pytest.mark.parametrize("returned", [None, "fine", [1], (Finding(severity="ok", title="x"),)])
def test_a_check_that_returns_nonsense_is_a_finding(returned: Any) -> None:
    class Odd(Check):
        """A check that returns something else."""

        def run(self, context: Context) -> list[Finding]:
            return returned

    found = diagnosed(registry=only(Odd, Good), quick=True)
    assert [item.finding.severity for item in found.findings] == ["broken", "ok"]


def test_only_extras_that_do_something_are_advised() -> None:
    told = software_checks.extra_packages()
    assert told, "LeZero's own metadata is there"
    source = "\n".join(path.read_text() for path in (ROOT / "lezero").rglob("*.py"))
    for extra, packages in told.items():
        for package in packages:
            used = rf"(import|from) {package}\b|need_extra\(.*\"{extra}\""
            assert re.search(used, source), f"{extra}: {package}"


def test_plug_ins_are_run_and_a_broken_one_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "plug_in-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plug-in\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[lezero.plugins]\n"
        "doctor-check.site = plug_in_site:Site\n"
        "doctor-check.gone = plug_in_gone:Gone\n"
        "doctor-check.wrong = plug_in_site:number\n"
    )
    (tmp_path / "plug_in_site.py").write_text(
        "from lezero.core.checks import Check, Finding\n"
        "class Site(Check):\n"
        "    def run(self, context):\n"
        "        return [Finding(severity='note', title='our site')]\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own: Registry[type[Check]] = Registry("doctor check", Check)
    own.register("good")(Good)
    found = {item.check: item.finding for item in diagnosed(registry=own, quick=True).findings}
    assert found["site"].title == "our site"
    assert found["good"].severity == "ok"
    assert found["gone"].severity == found["wrong"].severity == "broken"
    assert "plug_in_gone" in found["gone"].cause
    assert "is no Check" in found["wrong"].cause


def test_even_reading_the_machine_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise PermissionError("/proc is closed")

    monkeypatch.setattr(core_facts, "facts", fail)
    monkeypatch.setattr(core_facts, "cache_folder", fail)
    found = diagnose(ask=fail, registry=only(Good))
    assert {item.check for item in found.having("broken")} == {"facts", "cache", "torch"}
    assert found.having("ok")
    doctor_view.show(found)
    summary_lines(found)


def test_a_machine_without_proc_and_sys(tmp_path: Path) -> None:
    found = diagnosed(root=tmp_path, quick=True)
    assert not [item for item in found.findings if "failed" in item.finding.title]
    assert found.facts.memory.limit == 0
    doctor_view.show(found)


def test_a_cache_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path / "file" / "cache"))
    found = diagnosed()
    assert found.ceilings == FIGURES, "measured, though not kept"
    (warning,) = [item for item in found.having("warning") if item.check == "cache"]
    assert "LEZERO_CACHE" in warning.finding.fix


def test_measuring_once_again_or_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path))
    asked: list[tuple[Any, ...]] = []

    def measure(*arguments: Any) -> Ceilings:
        asked.append(arguments)
        return FIGURES

    assert diagnosed(quick=True, measure=measure).ceilings is None
    assert diagnosed(measure=measure).ceilings == FIGURES
    assert diagnosed(quick=True, measure=measure).ceilings == FIGURES
    diagnosed(measure=measure)
    diagnosed(refresh=True, measure=measure)
    assert asked == [(2, tmp_path)] * 2


def test_a_measurement_that_crashes_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> Ceilings:
        raise LeZeroError("measuring the ceilings failed (exit status signal 4)")

    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path))
    found = diagnosed(measure=crash)
    (item,) = found.having("broken")
    assert item.check == "ceilings"
    assert "signal 4" in item.finding.cause


@pytest.fixture
def lz(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `lz doctor ...` in a process of its own; `fakes` come first on its path."""

    def run(
        *words: str, fakes: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        folders = fakes, ROOT, os.environ.get("PYTHONPATH")
        path = os.pathsep.join(str(folder) for folder in folders if folder)
        environment = {**os.environ, "PYTHONPATH": path, **variables}
        return subprocess.run(
            [sys.executable, "-m", "lezero", "doctor", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_the_command_with_broken_torch_and_numpy(lz: Any, tmp_path: Path) -> None:
    fakes = fake(tmp_path / "fakes", "torch", "raise OSError('libtorch_cpu.so: bad ELF')")
    fake(fakes, "numpy", "raise ImportError('numpy is broken')")
    done = lz("--json", fakes=fakes)
    assert done.returncode == 1
    assert done.stderr == ""
    data = json.loads(done.stdout)
    broken = {item["check"]: item for item in data["findings"] if item["severity"] == "broken"}
    assert set(broken) == {"torch", "packages"}
    assert "bad ELF" in broken["torch"]["cause"]
    assert "numpy is broken" in broken["packages"]["cause"]
    done = lz(fakes=fakes)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "bad ELF" in done.stdout
    assert "2 things broken" in done.stdout


def test_the_command_where_the_command_line_itself_is_broken(lz: Any, tmp_path: Path) -> None:
    fakes = fake(tmp_path / "fakes", "torch", "raise OSError('bad ELF')")
    for name in ("typer", "pydantic", "rich"):
        fake(fakes, name, "raise ImportError('boom')")
    done = lz("--quick", fakes=fakes)
    assert done.returncode == 1
    assert done.stderr == ""
    for name in ("typer", "pydantic", "rich"):
        assert f"{name} cannot be imported" in done.stdout
        assert f"pip install --force-reinstall {name}" in done.stdout


@pytest.mark.parametrize("code", ["def f(:", "raise RuntimeError('boom')", "x = 1"])
@pytest.mark.parametrize("name", ["rich", "yaml", "safetensors"])
def test_the_command_with_a_damaged_package(lz: Any, tmp_path: Path, name: str, code: str) -> None:
    """Which may import all the same: half removed, say."""
    fakes = tmp_path / "fakes"
    (fakes / name).mkdir(parents=True)
    (fakes / name / "__init__.py").write_text(code)
    fake(fakes, "torch", "raise OSError('bad ELF')")
    done = lz("--quick", fakes=fakes)
    assert done.returncode == 1
    assert done.stderr == ""
    package = "PyYAML" if name == "yaml" else name
    assert f"pip install --force-reinstall {package}" in done.stdout
    assert done.stdout.count("2 things broken") == 1


def test_the_command_without_rich_colours_home_or_unicode(lz: Any, tmp_path: Path) -> None:
    fakes = fake(tmp_path / "fakes", "torch", "raise OSError('bad ELF \\u00b5')")
    done = lz(
        "--quick",
        fakes=fakes,
        HOME="/proc/nowhere",
        LEZERO_CACHE="",
        XDG_CACHE_HOME="",
        PYTHONIOENCODING="ascii",
    )
    assert done.returncode == 1
    assert "cannot be written" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_command_on_this_machine(lz: Any, tmp_path: Path) -> None:
    done = lz("--quick", LEZERO_CACHE=str(own_cache(tmp_path / "cache")))
    assert done.returncode == 0, done.stdout + done.stderr
    for heading in ("Machine", "Findings", "no ceilings measured yet"):
        assert heading in done.stdout
    lines = [line for line in done.stdout.splitlines() if " fix: " not in line]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("columns", [40, 80])
def test_no_width_breaks_a_command_or_cuts_a_figure(
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    command = f"sudo mount -o remount,size=8G {'/a/long/folder' * 6}"

    class Bad(Check):
        """One thing with a long command."""

        def run(self, context: Context) -> list[Finding]:
            return [Finding(severity="broken", title="it broke", cause="Because.", fix=command)]

    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", str(columns))
    doctor_view.show(diagnosed(registry=only(Bad, Good)))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith(f"fix: {command}")]
    assert all(len(line) <= columns for line in lines if command not in line)
    assert all(line == line.rstrip() for line in lines)
    said = [line for line in lines if re.search(r"GEMM fp32 +170 GFLOP/s", line)]
    assert ["disk write" in line or "memory" in line for line in said] == [columns == 80]


def test_plain_lines_stand_in_for_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "rich.console", None)
    found = diagnosed()
    doctor_view.show(found)
    out = capsys.readouterr().out
    assert "processor: " in out
    assert "GEMM fp32: 170 GFLOP/s" in out


def test_the_summary_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEZERO_CACHE", str(tmp_path))
    good = diagnosed(registry=only(Good))
    assert len(summary_lines(good)) == 3
    assert "bf16 400 GFLOP/s" in summary_lines(good)[1]

    class Bad(Check):
        """Four bad things."""

        def run(self, context: Context) -> list[Finding]:
            one = Finding(severity="broken", title="it broke", cause="Because.", fix="mend it")
            return [one] * 4

    bad = summary_lines(diagnosed(registry=only(Bad)))
    assert 3 <= len(bad) <= 6
    assert bad[-1].endswith("and 1 more: lz doctor")
    monkeypatch.setattr(module, "diagnose", lambda: good)
    assert summary_lines() == summary_lines(good)
