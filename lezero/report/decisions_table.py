"""Decisions on a terminal: what was chosen, why, and what each candidate measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lezero.report.decisions import Shown, shown

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def print_decisions(records: Iterable[Mapping[str, Any]], console: Console | None = None) -> None:
    """Prints records of `decisions.json`, for example those of `lezero.report.decisions.pick`."""
    from rich.console import Console

    out = console or Console(highlight=False)
    first = True
    for record in records:
        if not first:
            out.print()
        out.print(*_decision(shown(record)), sep="\n")
        first = False
    if first:
        out.print("this run recorded no decisions")


def _decision(decision: Shown) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    head = Text.assemble((decision.topic, "bold"), ": ", (decision.chosen, "bold cyan"))
    if decision.marks:
        head.append(f"  ({', '.join(decision.marks)})", "dim")
    lines: list[RenderableType] = [head]
    if decision.reason:
        lines.append(Padding(Text(decision.reason), (0, 0, 0, 2)))
    if decision.candidates:
        lines.append(Padding(_table(decision), (0, 0, 0, 2)))
    return lines


def _table(decision: Shown) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None, show_edge=False, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0)
    )
    table.add_column("")
    table.add_column("candidate")
    measured = any(c.value is not None for c in decision.candidates)
    if measured:
        table.add_column(Text(decision.heading), justify="right")
        table.add_column("")
    if any(c.rest for c in decision.candidates):
        table.add_column("")
    for candidate in decision.candidates:
        chosen = candidate.name == decision.chosen
        style = "bold" if chosen else "dim" if measured and candidate.value is None else ""
        cells = [Text(">" if chosen else " ", "cyan"), Text(candidate.name, style)]
        if measured:
            cells.append(Text(decision.figure(candidate), style))
            cells.append(Text(decision.times(candidate), "dim"))
        if candidate.rest:
            cells.append(Text(candidate.rest, style))
        table.add_row(*cells)
    return table
