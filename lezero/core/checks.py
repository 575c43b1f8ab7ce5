"""Extension point: checks that `lz doctor` runs.

A check looks at one thing and returns findings; an empty list means there was nothing to say. Who
calls what when: the doctor reads the machine once, makes one instance of every member of `checks`
(built in, or a plug-in's: entry point group `lezero.plugins`, name `doctor-check.<name>`), and
calls `run` once, in alphabetical order of the names. A check that raises becomes a finding itself
and the others go on. A check must be quick (well under a second), change nothing, print nothing,
and must not need torch to be imported: what torch says of itself is in `context.torch`.

    @checks.register("site-policy")
    class SitePolicy(Check):
        def run(self, context: Context) -> list[Finding]:
            ...

`tests/core/check_conformance.py` holds a test class that a new check's tests inherit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from lezero.core.facts import ROOT, Facts
from lezero.core.registry import Registry

Severity = Literal["ok", "note", "warning", "broken"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing found. "broken": something LeZero needs does not work; "warning": it works, but
    slower or less safely than it could; "note": worth knowing; "ok": looked at and good.

    title: what is so, in a few words. cause: why, and what it costs. fix: the command that mends it
    (or the nearest to a command there is); a warning or a broken thing always has one.
    """

    severity: Severity
    title: str
    cause: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            allowed = ", ".join(SEVERITIES)
            raise ValueError(f"severity: got {self.severity!r}, allowed is {allowed}")
        if not self.title.strip():
            raise ValueError("a finding needs a title")
        if self.severity in ("warning", "broken") and not (self.cause and self.fix):
            raise ValueError(f"'{self.title}': a {self.severity} finding needs a cause and a fix")

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a check may look at.

    facts: the machine. torch: what torch said in a process of its own: `version`, `cuda`, `hip`,
    `threads`, `accelerator`, `backends` …; empty where it does not import, and then `torch_error`
    says why. ceilings: `lezero.profiler.Ceilings`, or None where nothing was measured;
    `ceilings_error` says why. cache: the cache folder. root stands for `/`. quick: the user asked
    not to measure. environment: the variables of the process.
    """

    facts: Facts
    torch: Mapping[str, Any] = field(default_factory=dict)
    torch_error: str = ""
    ceilings: Any = None
    ceilings_error: str = ""
    cache: Path = Path("/nonexistent")
    root: Path = ROOT
    quick: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


class Check(ABC):
    """One check; made without arguments."""

    @abstractmethod
    def run(self, context: Context) -> list[Finding]:
        """Looks, changes nothing, and returns what it found (nothing: an empty list)."""


checks: Registry[type[Check]] = Registry("doctor check", Check)
