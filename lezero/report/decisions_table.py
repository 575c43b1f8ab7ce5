"""Decisions on a terminal: what was chosen, why, and what each candidate measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lezero.report.decisions import Shown, shown
from lezero.report.terminal import unpadded

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LEAST = 24
"""Characters that words beside a table must have, or they stand below its rows."""


def print_decisions(records: Iterable[Mapping[str, Any]], console: Console | None = None) -> None:
    """Prints records of `decisions.json`, for example those of `lezero.report.decisions.pick`."""
    from rich.console import Console

    out = console or Console(highlight=False)
    first = True
    with unpadded(out):
        for record in records:
            if not first:
                out.print()
            out.print(*_decision(shown(record), out.width), sep="\n")
            first = False
        if first:
            out.print("no decisions are recorded here: nothing was measured to choose from")


def _decision(decision: Shown, width: int) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    head = Text.assemble((decision.topic, "bold"), ": ", (decision.chosen, "bold cyan"))
    if decision.marks:
        head.append(f"  ({', '.join(decision.marks)})", "dim")
    lines: list[RenderableType] = [head]
    if decision.reason:
        lines.append(Padding(Text(decision.reason), (0, 0, 0, 2)))
    if decision.candidates:
        narrow = width - _width(decision) < _LEAST and any(c.rest for c in decision.candidates)
        table = _in_lines(decision) if narrow else [_table(decision)]
        lines += [Padding(each, (0, 0, 0, 2)) for each in table]
    return lines


def _width(decision: Shown) -> int:
    """Columns that the table takes beside what is said of a candidate in words."""
    names, figures, times = _cells(decision)
    return 10 + sum(max(map(len, each)) for each in (names, figures, times))


def _cells(decision: Shown) -> tuple[list[str], list[str], list[str]]:
    """Names, figures and ratios, the headings first."""
    candidates = decision.candidates
    measured = any(c.value is not None for c in candidates)
    return (
        ["candidate", *(c.name for c in candidates)],
        [decision.heading if measured else "", *(decision.figure(c) for c in candidates)],
        ["", *(decision.times(c) for c in candidates)],
    )


def _in_lines(decision: Shown) -> list[RenderableType]:
    """The table for a narrow terminal: what is said of a candidate in words stands below it."""
    from rich.padding import Padding
    from rich.text import Text

    names, figures, times = _cells(decision)
    widths = [max(map(len, each)) for each in (names, figures, times)]
    lines: list[RenderableType] = []
    for row, (name, figure, ratio) in enumerate(zip(names, figures, times, strict=True)):
        said = f"{name:<{widths[0]}}  {figure:>{widths[1]}}  {ratio}".rstrip()
        if not row:
            lines.append(Text(f"   {said}", "dim"))
            continue
        candidate = decision.candidates[row - 1]
        chosen = candidate.name == decision.chosen
        mark = (">" if chosen else " ", "cyan")
        lines.append(Text.assemble(mark, "  ", (said, "bold" if chosen else "")))
        if candidate.rest:
            lines.append(Padding(Text(candidate.rest, "dim"), (0, 0, 0, 5)))
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
