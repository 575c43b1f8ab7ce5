"""`lz doctor`: what this machine is, what it reached, and what is wrong with it.

It never crashes on a broken installation: torch is asked and the ceilings are measured in processes
of their own, every check stands alone, and one that raises becomes a finding itself. Nothing here
imports torch or numpy.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lezero.jobs.ceiling_checks
import lezero.jobs.machine_checks
import lezero.jobs.native_checks
import lezero.jobs.software_checks  # noqa: F401  (importing a file registers its checks)
from lezero.core import facts as core_facts
from lezero.core.checks import SEVERITIES, Check, Context, Finding, checks
from lezero.core.errors import ConfigError
from lezero.core.facts import ROOT, Cpu, Facts, Memory
from lezero.core.registry import Registry
from lezero.jobs.doctor_probe import Probe, probe
from lezero.profiler.ceilings import Ceilings, cache_file, cached, load
from lezero.profiler.measure import measure_apart
from lezero.report import units

FORMAT = 1


@dataclass(frozen=True)
class Found:
    """One finding and the name of the check that made it."""

    check: str
    finding: Finding

    def to_dict(self) -> dict[str, str]:
        return {"check": self.check, **self.finding.to_dict()}


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor saw. `findings`: broken first, then warnings, notes, and what is good."""

    facts: Facts
    torch: Mapping[str, Any] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    findings: tuple[Found, ...] = ()

    @property
    def broken(self) -> bool:
        """True when something that LeZero needs does not work."""
        return any(found.finding.severity == "broken" for found in self.findings)

    @property
    def exit_status(self) -> int:
        return 1 if self.broken else 0

    def having(self, severity: str) -> list[Found]:
        return [found for found in self.findings if found.finding.severity == severity]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; what `lz doctor --json` prints."""
        return {
            "format": FORMAT,
            "broken": self.broken,
            "facts": self.facts.to_dict(),
            "torch": dict(self.torch),
            "ceilings": self.ceilings.to_dict() if self.ceilings is not None else None,
            "findings": [found.to_dict() for found in self.findings],
        }


def diagnose(
    refresh: bool = False,
    quick: bool = False,
    *,
    root: Path = ROOT,
    registry: Registry[type[Check]] = checks,
    ask: Callable[[], Probe] = probe,
    measure: Callable[..., Ceilings] = measure_apart,
) -> Diagnosis:
    """Reads the machine, asks torch, measures what is not yet known, and runs every check.

    refresh: measure again. quick: measure nothing. root, registry, ask and measure are for tests.
    Never raises because something is broken: that is what the findings are for.
    """
    problems: list[Found] = []
    answer = _guarded("torch", ask, Probe(error="torch could not be asked"), problems)
    read = _guarded(
        "facts", lambda: core_facts.facts(root, answer.accelerators), _unknown(), problems
    )
    cache = _guarded("cache", core_facts.cache_folder, Path("/nonexistent"), problems)
    ceilings, error = None, ""
    if answer.torch:
        try:
            ceilings = _ceilings(read, answer, cache, refresh, quick, measure)
        except Exception as failure:
            error = _one_line(failure)
    context = Context(
        facts=read,
        torch=answer.torch,
        torch_error=answer.error,
        ceilings=ceilings,
        ceilings_error=error,
        cache=cache,
        root=root,
        quick=quick,
        environment=dict(os.environ),
    )
    found = problems + _run_checks(registry, context)
    found.sort(key=lambda item: -SEVERITIES.index(item.finding.severity))
    return Diagnosis(read, answer.torch, ceilings, tuple(found))


def doctor(as_json: bool = False, refresh: bool = False, quick: bool = False) -> int:
    """The command: prints the diagnosis and returns the exit status (1: something is broken)."""
    from lezero.jobs import doctor_view

    if quick and refresh:
        raise ConfigError("--quick measures nothing, and --refresh measures again: leave one out")
    if as_json:
        found = diagnose(refresh, quick)
        doctor_view.write_json(found.to_dict())
    else:
        doing = "asking torch, building kernels the first time"
        with doctor_view.waiting(doing if quick else f"{doing}, measuring this machine"):
            found = diagnose(refresh, quick)
        doctor_view.show(found)
    return found.exit_status


def summary_lines(found: Diagnosis | None = None) -> list[str]:
    """Three to six plain lines: the machine, what it reaches, and what is wrong, if anything."""
    found = diagnose() if found is None else found
    cpu, memory, ceilings = found.facts.cpu, found.facts.memory, found.ceilings
    gpus = found.facts.accelerators
    device = f", {len(gpus)} x {gpus[0].name}" if gpus else ""
    lines = [
        f"machine   {cpu.model}: {cpu.usable} usable cores, {units.size(memory.limit)} of memory, "
        f"torch {found.torch.get('version', 'not usable')}{device}"
    ]
    if ceilings is not None:
        rates = [
            f"{name} {units.rate(rate, 'FLOP/s')}"
            for name in ("fp32", "bf16")
            if (rate := ceilings.gemm(name)) is not None
        ]
        if ceilings.memory_read is not None:
            rates.append(f"memory read {units.rate(ceilings.memory_read, 'B/s')}")
        lines.append(f"measured  {', '.join(rates)}")
    bad = found.having("broken") + found.having("warning")
    for item in bad[:3]:
        lines.append(f"{item.finding.severity:<9} {item.finding.title}; fix: {item.finding.fix}")
    if len(bad) > 3:
        lines.append(f"          and {len(bad) - 3} more: lz doctor")
    if not bad:
        lines.append(f"doctor    nothing wrong: {len(found.having('ok'))} checks are good")
    return lines


def _ceilings(
    read: Facts,
    answer: Probe,
    cache: Path,
    refresh: bool,
    quick: bool,
    measure: Callable[..., Ceilings],
) -> Ceilings | None:
    threads = int(answer.torch["threads"])
    path = cache_file(read.machine_id, str(answer.torch["accelerator"]), threads, cache)
    if quick:
        return load(path)
    return cached(path, lambda: measure(threads, cache), refresh)


def _run_checks(registry: Registry[type[Check]], context: Context) -> list[Found]:
    found: list[Found] = []
    names = _guarded("plug-ins", registry.names, [], found)
    for name in names:
        try:
            member = registry.get(name)
            made = member().run(context)
            if not isinstance(made, list) or not all(isinstance(item, Finding) for item in made):
                raise TypeError(f"it returned {made!r}, a list of findings is expected")
        except (Exception, SystemExit) as error:
            found.append(_crashed(name, error))
            continue
        found += [Found(name, item) for item in made]
    return found


def _guarded(name: str, call: Callable[[], Any], otherwise: Any, problems: list[Found]) -> Any:
    try:
        return call()
    except Exception as error:
        problems.append(_crashed(name, error))
        return otherwise


def _crashed(name: str, error: BaseException) -> Found:
    finding = Finding(
        severity="broken",
        title=f"the check '{name}' failed",
        cause=_one_line(error),
        fix="lz --debug doctor   # and report it to whoever made the check",
    )
    return Found(name, finding)


def _one_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or ["no message"])[0]
    return text if type(error).__name__ == "LeZeroError" else f"{type(error).__name__}: {text}"


def _unknown() -> Facts:
    """Stands in where even reading the machine fails."""
    cores = os.cpu_count() or 1
    cpu = Cpu("unknown", platform.machine(), cores, cores, None, cores, (), {})
    memory = Memory(0, 0, 0, "unknown", 0, 0, "")
    return Facts("unknown", platform.python_version(), cpu, memory, (), "", {}, {})
