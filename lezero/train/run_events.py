"""What happened in a run besides its steps, as rows of the report's table."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lezero.report.units import size, span
from lezero.train.run_documents import real


def event_rows(events: Sequence[Mapping[str, Any]]) -> list[tuple[object, ...]]:
    """One row an event; many of a kind in a row become one, but notes stay: each says its own."""
    rows: list[tuple[object, ...]] = []
    i = 0
    while i < len(events):
        end = i
        kind = events[i].get("event")
        while kind != "note" and end + 1 < len(events) and events[end + 1].get("event") == kind:
            end += 1
        group = [events[end]] if end - i >= 4 else events[i : end + 1]
        for event in group:
            moment, step = real(event, "time"), real(event, "step")
            when = time.strftime("%H:%M:%S", time.localtime(moment)) if moment else ""
            more = f", the last of {end - i + 1}" if end - i >= 4 else ""
            what = f"{event.get('event')}{more}"
            detail = str(event.get("text") or "") or ", ".join(
                _named_figure(k, v) for k, v in event.items() if k not in ("event", "step", "time")
            )
            rows.append((when, "" if step is None else f"{step:,.0f}", what, detail))
        i = end + 1
    return rows[-200:]


def _named_figure(name: str, value: Any) -> str:
    """An event's figure, in the unit that its name says."""
    for unit, form in (("_seconds", span), ("_bytes", size)):
        if name.endswith(unit) and isinstance(value, int | float):
            name, value = name.removesuffix(unit), form(value)
    return f"{name} {value}".replace("_", " ")
