"""Python processes that LeZero starts import what it does, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lezero.core.python import same_imports
from lezero.jobs.doctor_probe import probe


def test_the_same_is_imported_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(7)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path, Path("/nowhere")])
    words = [sys.executable, "-c", "import json, lezero, pytest"]
    assert subprocess.run(words, env=same_imports(), check=False).returncode == 0
    assert not probe().error
