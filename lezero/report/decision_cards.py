"""Decisions on a page: one card each, with the candidates' figures as bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lezero.report.decisions import Shown, shown
from lezero.report.markup import Markup, tag


def decision_cards(records: Iterable[Mapping[str, Any]]) -> Markup:
    """The cards of records of `decisions.json`."""
    return tag("div", *(_card(shown(record)) for record in records), class_="cards")


def _card(decision: Shown) -> Markup:
    head = tag(
        "div",
        tag("h3", decision.topic),
        tag("span", decision.chosen, class_="badge"),
        *(tag("span", mark, class_="flag") for mark in decision.marks),
        class_="head",
    )
    reason = tag("p", decision.reason) if decision.reason else ""
    bars = _bars(decision) if decision.candidates else ""
    return tag("div", head, reason, bars, class_="card")


def _bars(decision: Shown) -> Markup:
    largest = max((abs(c.value) for c in decision.candidates if c.value is not None), default=0.0)
    unit = tag("p", decision.heading, class_="unit") if decision.unit and largest else ""
    rows = []
    for candidate in decision.candidates:
        chosen = candidate.name == decision.chosen
        said = "  ".join(
            part for part in (decision.figure(candidate), decision.times(candidate)) if part
        )
        rest = tag("span", candidate.rest, class_="rest") if candidate.rest else ""
        line = tag("div", tag("span", candidate.name), tag("span", said), class_="pair")
        share = abs(candidate.value) / largest if candidate.value is not None and largest else 0.0
        strong = " strong" if chosen else ""
        bar = (
            tag(
                "svg",
                tag("rect", width="100%", height=6, rx=3, class_="track"),
                tag(
                    "rect",
                    width=f"{max(0.3, 100 * share):.2f}%",
                    height=6,
                    rx=3,
                    class_=f"bar{strong}",
                ),
                width="100%",
                height=6,
                aria_hidden="true",
            )
            if share
            else ""
        )
        rows.append(tag("li", line, bar, rest, class_=strong.strip() or None))
    return tag("div", unit, tag("ul", *rows, class_="candidates"))
