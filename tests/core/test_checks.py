"""The extension point of the doctor: findings explain themselves, members are checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lezero.core.checks import Check, Context, Finding, checks
from lezero.core.errors import LeZeroError
from lezero.core.registry import Registry
from tests.core.check_conformance import CheckConformance


class DiskIsRound(Check):
    """Whether the disk is round."""

    def run(self, context: Context) -> list[Finding]:
        if not context.torch:
            return []
        return [Finding(severity="warning", title="square", cause="It is not.", fix="sand it")]


class TestDiskIsRound(CheckConformance):
    check = DiskIsRound


def test_a_finding_says_what_why_and_how_to_mend_it() -> None:
    good = Finding(severity="broken", title="no torch", cause="Not installed.", fix="pip install")
    assert good.to_dict() == {
        "severity": "broken",
        "title": "no torch",
        "cause": "Not installed.",
        "fix": "pip install",
    }
    Finding(severity="ok", title="all well")
    for severity in ("warning", "broken"):
        with pytest.raises(ValueError, match="needs a cause and a fix"):
            Finding(severity=severity, title="x", cause="y")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="allowed is ok, note, warning, broken"):
        Finding(severity="fatal", title="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="title"):
        Finding(severity="ok", title=" ")


def test_only_checks_can_be_members() -> None:
    own: Registry[type[Check]] = Registry("doctor check", Check)
    own.register("disk")(DiskIsRound)
    assert own.get("disk") is DiskIsRound
    with pytest.raises(LeZeroError, match="is no Check"):
        own.register("other")(int)  # type: ignore[arg-type]
    with pytest.raises(LeZeroError, match="registered twice"):
        own.register("disk")(DiskIsRound)


def test_the_extension_point_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "import lezero.core.checks, lezero.jobs.doctor, lezero.cli.doctor, lezero.profiler\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert checks.kind == "doctor check"
