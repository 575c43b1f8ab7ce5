"""Horizontal bars: a label and a figure above each bar, readable at any width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lezero.report import units
from lezero.report.markup import Markup, tag

_ROW = 38


@dataclass(frozen=True)
class Bar:
    """One bar. None or a value that is not finite has no bar, only its note. strong: stands out."""

    name: str
    value: float | None
    note: str = ""
    strong: bool = False


@dataclass(frozen=True)
class BarPlot:
    """Bars on one scale from 0.

    kind: "bytes", "seconds", "count" or ""; `unit` follows the figure.
    """

    title: str
    bars: Sequence[Bar]
    kind: str = ""
    unit: str = ""

    def render(self) -> Markup:
        """The plot as one `<figure>`."""
        finite = [b.value for b in self.bars if b.value is not None and math.isfinite(b.value)]
        largest = max((abs(value) for value in finite), default=0.0)
        rows = [part for i, bar in enumerate(self.bars) for part in self._row(i, bar, largest)]
        height = max(1, len(self.bars)) * _ROW
        if not self.bars:
            rows = [tag("text", "nothing to show", x="50%", y=_ROW // 2, class_="none")]
        drawing = tag(
            "svg", *rows, width="100%", height=height, role="img", aria_label=self._says()
        )
        caption = tag("figcaption", self.title) if self.title else ""
        return tag("figure", caption, tag("div", drawing, class_="bars"), class_="plot")

    def _row(self, index: int, bar: Bar, largest: float) -> list[Markup]:
        top = index * _ROW
        shown = bar.value is not None and math.isfinite(bar.value)
        out = [
            tag(
                "text", bar.name, x="0", y=top + 14, class_="name strong" if bar.strong else "name"
            ),
            tag("text", self._figure(bar), x="100%", y=top + 14, class_="figure end"),
            tag("rect", x="0", y=top + 21, width="100%", height=8, rx=4, class_="track"),
        ]
        if shown and largest > 0:
            width = max(0.3, 100 * abs(bar.value or 0.0) / largest)
            said = tag("title", f"{bar.name}: {self._figure(bar)}")
            out.append(
                tag(
                    "rect",
                    said,
                    x="0",
                    y=top + 21,
                    width=f"{width:.2f}%",
                    height=8,
                    rx=4,
                    class_="bar strong" if bar.strong else "bar",
                )
            )
        return out

    def _figure(self, bar: Bar) -> str:
        if bar.value is None:
            return bar.note or "n/a"
        said = {"bytes": units.size, "seconds": units.span, "count": units.count}.get(
            self.kind, units.number
        )(bar.value)
        said = f"{said} {self.unit}" if self.unit else said
        return f"{said} · {bar.note}" if bar.note else said

    def _says(self) -> str:
        said = "; ".join(f"{bar.name}: {self._figure(bar)}" for bar in self.bars)
        return f"{self.title}. {said}" if self.title else said
