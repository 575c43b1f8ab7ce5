"""How a diagnosis looks: for people with rich, plain lines where rich does not import, and JSON."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lezero import __version__
from lezero.report import units

if TYPE_CHECKING:
    from rich.console import Console

    from lezero.jobs.doctor import Diagnosis

_COLOURS = {"broken": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}
_TWO_COLUMNS = 66
"""Characters of a line that hold two of the ceilings."""
_SETS = {
    "AVX2": ("avx2",),
    "AVX-512": ("avx512f",),
    "AVX-512 VNNI": ("avx512_vnni",),
    "AVX-VNNI": ("avx_vnni",),
    "AVX-512 BF16": ("avx512_bf16",),
    "AVX-512 FP16": ("avx512_fp16",),
    "AMX": ("amx_tile",),
    "AMX int8": ("amx_int8",),
    "AMX bf16": ("amx_bf16",),
    "AMX fp16": ("amx_fp16",),
    "NEON": ("neon",),
    "dot product": ("dotprod",),
    "fp16": ("fp16",),
    "bf16": ("bf16",),
    "i8mm": ("i8mm",),
    "SVE": ("sve",),
    "SVE2": ("sve2",),
    "SME": ("sme",),
}


def write_json(data: dict[str, Any]) -> None:
    """One JSON object on one line of stdout."""
    print(json.dumps(data), flush=True)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows that something is going on, on a terminal's stderr only."""
    if not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console

        status = Console(stderr=True).status(f"{what} ...", spinner="line")
    except Exception:
        yield
        return
    with status:
        yield


def show(found: Diagnosis) -> None:
    """Writes the diagnosis to stdout, in colour on a terminal."""
    try:
        text = _with_rich(found)
    except Exception:  # it may be what is broken
        text = "\n".join(plain_lines(found)) + "\n"
    sys.stdout.write(text)
    sys.stdout.flush()


def plain_lines(found: Diagnosis) -> list[str]:
    """The same content without rich."""
    lines = [f"{title}: {value}" for title, value in machine_rows(found)]
    lines += [f"{title}: {value}" for title, value in ceiling_rows(found)]
    for item in found.findings:
        lines.append(f"{item.finding.severity}: {item.finding.title}")
        lines += [f"  {text}" for text in (item.finding.cause, item.finding.fix) if text]
    return [*lines, closing(found)]


def machine_rows(found: Diagnosis) -> list[tuple[str, str]]:
    """What the machine is: (name, value)."""
    facts, torch = found.facts, found.torch
    cpu, memory = facts.cpu, facts.memory
    sets = [name for name, needed in _SETS.items() if set(needed) <= set(cpu.instruction_sets)]
    caches = [f"{name} {units.size(size)}" for name, size in cpu.caches.items()]
    limit = "" if memory.limit == memory.total else f" (limit of {memory.limited_by})"
    rows = [
        ("system", f"{facts.system}, Python {facts.python}, LeZero {__version__}"),
        ("processor", f"{cpu.model}, {cpu.usable} of {cpu.logical} cores usable"),
        ("instructions", ", ".join(sets) or "unknown"),
        ("caches", ", ".join(caches)),
        ("memory", f"{units.size(memory.limit)}{limit}, {units.size(memory.available)} free"),
    ]
    for device in facts.accelerators:
        generation = f", capability {device.capability}" if device.capability else ""
        size = f", {units.size(device.memory)}" if device.memory else ""
        rows.append((f"{device.platform} {device.index}", f"{device.name}{size}{generation}"))
    if not facts.accelerators:
        rows.append(("accelerator", "none"))
    built = torch.get("cuda") and f"CUDA {torch['cuda']}"
    built = built or (torch.get("hip") and f"ROCm {torch['hip']}") or "CPU"
    text = "cannot be used"
    if torch:
        text = f"{torch['version']}, built for {built}, {torch.get('threads')} threads"
    rows.append(("torch", text))
    skipped = ("torch", "lezero")
    others = [f"{name} {v}" for name, v in facts.versions.items() if name not in skipped]
    rows.append(("packages", ", ".join(others)))
    compilers = [" ".join([n, *_release(line)]) for n, line in facts.compilers.items()]
    rows.append(("compilers", ", ".join(compilers) or "none"))
    return [(name, value) for name, value in rows if value]


def ceiling_rows(found: Diagnosis) -> list[tuple[str, str]]:
    """What was measured: (name, value with its unit)."""
    ceilings = found.ceilings
    if ceilings is None:
        return []
    rates: list[tuple[str, float | None, str]] = [
        ("GEMM fp32", ceilings.gemm_fp32, "FLOP/s"),
        ("GEMM bf16", ceilings.gemm_bf16, "FLOP/s"),
        ("GEMM fp16", ceilings.gemm_fp16, "FLOP/s"),
        ("GEMM int8", ceilings.gemm_int8, "OP/s"),
        ("memory read", ceilings.memory_read, "B/s"),
        ("memory copy", ceilings.memory_copy, "B/s"),
        ("new memory", ceilings.memory_fresh, "B/s"),
        ("disk write", ceilings.disk_write, "B/s"),
        ("host to device", ceilings.h2d, "B/s"),
        ("device to host", ceilings.d2h, "B/s"),
    ]
    rows = [(name, units.rate(value, unit)) for name, value, unit in rates if value is not None]
    if ceilings.op_overhead is not None:
        rows.append(("one operation", units.span(ceilings.op_overhead)))
    return rows


def closing(found: Diagnosis) -> str:
    """The last line: what the exit status says, in words."""
    broken, warnings = found.having("broken"), found.having("warning")
    good = f"{len(found.having('ok'))} good"
    if broken:
        return f"{_count(broken, 'thing')} broken, {_count(warnings, 'warning')}, {good}"
    if warnings:
        return f"nothing broken, {_count(warnings, 'warning')}, {good}"
    return f"nothing wrong, {good}"


def _with_rich(found: Diagnosis) -> str:
    """All of it before any is written, so that nothing is there twice."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    with console.capture() as written:
        _print(found, console)
    text = written.get()
    if console.is_terminal:
        return text
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def _print(found: Diagnosis, console: Console) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    def heading(text: str, more: str = "") -> None:
        console.print()
        console.print(Text.assemble((text, "bold"), (f"  {more}" if more else "", "dim")))

    heading("Machine")
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in machine_rows(found):
        table.add_row(name, Text(value))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))

    rows = ceiling_rows(found)
    if rows and found.ceilings is not None:
        ceilings = found.ceilings
        day = ceilings.measured_at.partition("T")[0]
        heading("Ceilings", f"measured {day} on {ceilings.device}, {ceilings.threads} threads")
        table = Table.grid(padding=(0, 2), pad_edge=False)
        half = (len(rows) + 1) // 2 if console.width >= _TWO_COLUMNS else len(rows)
        for style, justify in (("dim", "left"), ("", "right"), ("dim", "left"), ("", "right")):
            table.add_column(style=style, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for index in range(half):
            second = rows[half + index] if half + index < len(rows) else ()
            table.add_row(*rows[index], *(f"   {second[0]}", second[1]) if second else ())
        console.print(Padding(table, (0, 0, 0, 2), expand=False))

    heading("Findings")
    told = [item for item in found.findings if item.finding.severity != "ok"]
    widest = max((len(item.finding.severity) for item in told), default=len("ok"))

    def row(severity: str, body: Text) -> None:
        table = Table.grid(padding=(0, 2), pad_edge=False)
        table.add_column(no_wrap=True, width=widest)
        table.add_column(overflow="fold")
        table.add_row(Text(severity, style=_COLOURS[severity]), body)
        console.print(Padding(table, (0, 0, 0, 2), expand=False))

    for item in told:
        finding = item.finding
        body = Text(finding.title, style="bold")
        if finding.cause:
            body.append(f"\n{finding.cause}", style="not bold")
        row(finding.severity, body)
        for line in finding.fix.splitlines():  # whole, so that it can be copied
            start = f"{'':<{widest + 4}}fix: "
            console.print(Text.assemble((start, "dim"), (line, "green")), soft_wrap=True)
    good = " · ".join(item.finding.title for item in found.having("ok"))
    if good:
        row("ok", Text(good, style="dim"))
    console.print()
    style = _COLOURS["broken" if found.broken else "warning" if found.having("warning") else "ok"]
    console.print(Text(closing(found), style=style))


def _release(line: str) -> list[str]:
    """The last thing in a compiler's line that looks like a version."""
    return re.findall(r"\d+\.\d+(?:\.\d+)?", line)[-1:]


def _count(things: list[Any], name: str) -> str:
    return f"{len(things) or 'no'} {name}{'' if len(things) == 1 else 's'}"
