"""What every doctor check must do. Inherit `CheckConformance` beside a new check:

class TestSitePolicy(CheckConformance):
    check = SitePolicy
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lezero.core import facts
from lezero.core.checks import Check, Context, Finding

TORCH = {
    "version": "2.13.0+cpu",
    "cuda": None,
    "hip": None,
    "threads": 2,
    "backends": ["gloo"],
    "computes": True,
    "numpy": True,
    "accelerator": "cpu",
}


@functools.cache
def machine() -> facts.Facts:
    """This machine, asked once: its compilers take a while to answer."""
    return facts.facts(accelerators=())


def context(folder: Path, **changes: Any) -> Context:
    """A context of this machine with a good torch and nothing measured."""
    base = Context(facts=machine(), torch=TORCH, cache=folder / "cache", environment={})
    return replace(base, **changes)


class CheckConformance:
    """Name the check in `check`; the rest is inherited."""

    check: ClassVar[type[Check]]
    seconds: ClassVar[float] = 2.0

    def situations(self, folder: Path) -> list[Context]:
        """What a check meets: a good machine, no torch, and one that tells nothing at all."""
        (folder / "file").write_text("")
        nowhere = folder / "empty"
        untold = {"cpu": facts.cpu(nowhere), "memory": facts.memory(nowhere), "driver": ""}
        bare = replace(machine(), versions={}, compilers={}, system="", **untold)
        return [
            context(folder),
            context(folder, quick=True),
            context(folder, torch={}, torch_error="ImportError: libtorch.so: no such file"),
            context(folder, ceilings_error="the measuring process ended with SIGILL"),
            context(folder, facts=bare, root=folder / "empty", torch={}),
            context(folder, cache=folder / "file" / "cache"),
        ]

    def test_is_made_without_arguments(self) -> None:
        assert isinstance(self.check(), Check)
        assert (self.check.__doc__ or "").strip(), "a check says what it looks at"

    def test_returns_findings_in_every_situation(self, tmp_path: Path) -> None:
        for number, situation in enumerate(self.situations(tmp_path)):
            began = time.monotonic()
            found = self.check().run(situation)
            assert time.monotonic() - began < self.seconds
            assert isinstance(found, list), number
            for finding in found:
                assert isinstance(finding, Finding)
                assert len(finding.title) < 100, "a title is one short line"
                assert "\n" not in finding.title + finding.fix
                json.dumps(finding.to_dict())

    def test_changes_and_prints_nothing(self, tmp_path: Path) -> None:
        before = (dict(os.environ), os.getcwd())
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            for situation in self.situations(tmp_path):
                self.check().run(situation)
        assert out.getvalue() == ""
        assert (dict(os.environ), os.getcwd()) == before
        left = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert left == [tmp_path / "file"]

    def test_does_not_import_torch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = builtins.__import__

        def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
            assert name.partition(".")[0] != "torch", "what torch says is in context.torch"
            return real(name, *args, **kwargs)

        situation = context(tmp_path)
        monkeypatch.setattr(builtins, "__import__", guarded)
        self.check().run(situation)
