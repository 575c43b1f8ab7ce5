"""Line plots as inline SVG that fits any width.

[Note: one drawing for every width]
The SVG has no viewBox: its width is that of the page, its height is fixed. Text, ticks and dots are
placed in percent across and in pixels down, so they never stretch. Only the curves live in a nested
SVG that does (`preserveAspectRatio="none"`), with strokes that keep their width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lezero.report import units
from lezero.report.markup import Markup, tag
from lezero.report.scale import Axis, linear, logarithmic
from lezero.report.thin import thin

WIDE = 1000
COLORS = 6


@dataclass(frozen=True)
class Series:
    """One curve. Values that are not finite leave a gap.

    faint: drawn thin and pale, as background to a smoothed curve. dots: each point is marked; for
    few points. color: which of the page's colours; the next one when None.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    faint: bool = False
    dots: bool = False
    color: int | None = None


@dataclass(frozen=True)
class Mark:
    """A vertical line at `x`: something that happened there."""

    x: float
    label: str


@dataclass(frozen=True)
class Level:
    """A dashed horizontal line at `y`, with a band from `low` to `high` when given."""

    y: float
    label: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class LinePlot:
    """A plot of several series over one x axis.

    kind: what y counts: "bytes", "seconds", "count", "percent" (of a fraction) or "" for a plain
    number; `unit` follows its prefix in the title ("tok/s"). log: logarithmic y; values ≤ 0 are
    gaps. zero: 0 is always shown. limit: points drawn of each series.
    """

    title: str
    series: Sequence[Series]
    x_label: str = "step"
    kind: str = ""
    unit: str = ""
    log: bool = False
    zero: bool = False
    marks: Sequence[Mark] = ()
    levels: Sequence[Level] = ()
    height: int = 230
    limit: int = 1000

    def render(self) -> Markup:
        """The plot as one `<figure>`."""
        return _Drawing(self).figure()


class _Drawing:
    """One plot being drawn: its series thinned, in the unit and on the axes that suit them."""

    def __init__(self, plot: LinePlot) -> None:
        self.plot = plot
        finite = [abs(v) for s in plot.series for v in s.y if math.isfinite(v)]
        finite += [abs(level.y) for level in plot.levels if math.isfinite(level.y)]
        self.divisor, prefix = units.scale(plot.kind, max(finite, default=0.0))
        self.unit = f"{prefix} {plot.unit}".strip()
        self.series = [self._fit(s) for s in plot.series]
        self.levels = [level for level in plot.levels if math.isfinite(level.y)]
        self.marks = [mark for mark in plot.marks if math.isfinite(mark.x)]
        self.empty = not any(math.isfinite(v) for s in self.series for v in s.y)
        self.colors = _colors(plot.series)
        self.x = linear(
            [v for s in self.series for v in s.x] + [mark.x for mark in self.marks],
            ticks=5,
            tight=True,
            whole=plot.x_label == "step",
        )
        self.y = self._y_axis()

    def figure(self) -> Markup:
        return tag(
            "figure",
            tag("figcaption", self.plot.title, self._unit()),
            self._legend(),
            tag(
                "div",
                self._svg(),
                class_="chart",
                data_plot=None if self.empty else self._data(),
            ),
            class_="plot",
        )

    def _fit(self, series: Series) -> Series:
        x, y = thin(series.x, series.y, self.plot.limit)
        return replace(series, x=x, y=[v / self.divisor for v in y])

    def _y_axis(self) -> Axis:
        values = [v for s in self.series for v in s.y]
        for level in self.levels:
            ends = (level.y, level.low, level.high)
            values += [v / self.divisor for v in ends if v is not None]
        if self.plot.log and any(v > 0 for v in values):
            return logarithmic(values)
        return linear(values, ticks=4, zero=self.plot.zero)

    def _unit(self) -> Markup | str:
        return tag("span", self.unit, class_="unit") if self.unit else ""

    def _legend(self) -> Markup | str:
        keys = [
            tag("span", tag("i", class_=f"key c{color}{_faint(s)}"), s.name)
            for s, color in zip(self.series, self.colors, strict=True)
        ]
        keys += [tag("span", tag("i", class_="key level"), level.label) for level in self.levels]
        return tag("div", *keys, class_="legend") if len(keys) > 1 else ""

    def _svg(self) -> Markup:
        height = self.plot.height
        if self.empty:
            note = tag("text", "no values yet", x="50%", y=height // 2, class_="none")
            parts: list[Markup] = [note]
        else:
            parts = [*self._grid(), *self._bands(), self._curves(), *self._dots(), *self._events()]
        parts.append(tag("text", self.plot.x_label, x="100%", y=height + 34, class_="tx end"))
        return tag("svg", *parts, width="100%", height=height, role="img", aria_label=self._says())

    def _says(self) -> str:
        """What a screen reader says: the range of each curve."""
        said = []
        for s in self.series:
            finite = [v for v in s.y if math.isfinite(v)]
            if finite:
                last = units.number(finite[-1])
                low, high = units.number(min(finite)), units.number(max(finite))
                said.append(f"{s.name}: {low} to {high}, last {last} {self.unit}".strip())
        return f"{self.plot.title}. " + ("; ".join(said) or "no values yet")

    def _down(self, y: float) -> float:
        return (1 - self.y.place(y)) * self.plot.height

    def _across(self, x: float) -> str:
        return f"{100 * self.x.place(x):.2f}%"

    def _grid(self) -> list[Markup]:
        out = []
        for value, label in zip(self.y.ticks, self.y.labels, strict=True):
            y = f"{self._down(value):.1f}"
            out.append(tag("line", x1="0", x2="100%", y1=y, y2=y, class_="grid"))
            out.append(tag("text", label, x="-8", y=y, class_="ty"))
        height = self.plot.height
        for value, label in zip(self.x.ticks, self.x.labels, strict=True):
            x = self._across(value)
            out.append(tag("line", x1=x, x2=x, y1=height, y2=height + 5, class_="axis"))
            out.append(tag("text", label, x=x, y=height + 18, class_="tx"))
        out.append(tag("line", x1="0", x2="100%", y1=height, y2=height, class_="axis"))
        return out

    def _bands(self) -> list[Markup]:
        out = []
        for level in self.levels:
            if level.low is not None and level.high is not None:
                top, foot = (self._down(v / self.divisor) for v in (level.high, level.low))
                out.append(
                    tag(
                        "rect",
                        x="0",
                        y=f"{top:.1f}",
                        width="100%",
                        height=f"{foot - top:.1f}",
                        class_="band",
                    )
                )
            y = f"{self._down(level.y / self.divisor):.1f}"
            said = tag(
                "title", f"{level.label}: {units.number(level.y / self.divisor)} {self.unit}"
            )
            out.append(tag("line", said, x1="0", x2="100%", y1=y, y2=y, class_="level"))
        return out

    def _curves(self) -> Markup:
        height = self.plot.height
        paths = [
            tag("path", d=path, class_=f"curve c{color}{_faint(s)}")
            for s, color in zip(self.series, self.colors, strict=True)
            if (path := self._path(s))
        ]
        box = f"0 0 {WIDE} {height}"
        return tag(
            "svg",
            *paths,
            width="100%",
            height=height,
            viewBox=box,
            preserveAspectRatio="none",
            class_="curves",
        )

    def _path(self, series: Series) -> str:
        """SVG path data; a value that cannot be shown lifts the pen."""
        out: list[str] = []
        down = False
        for x, y in zip(series.x, series.y, strict=True):
            across, high = self.x.place(x) * WIDE, self._down(y)
            if math.isfinite(across) and math.isfinite(high):
                out.append(f"{'L' if down else 'M'}{across:.1f} {high:.1f}")
                down = True
            else:
                down = False
        return "".join(out)

    def _dots(self) -> list[Markup]:
        out = []
        for s, color in zip(self.series, self.colors, strict=True):
            lonely = [] if s.dots else _lonely(s.y)
            for i in range(len(s.y)) if s.dots else lonely:
                y = self._down(s.y[i])
                if math.isfinite(y):
                    text = f"{s.name}: {units.number(s.y[i])} {self.unit}".strip()
                    out.append(
                        tag(
                            "circle",
                            tag("title", f"{text} at {units.number(s.x[i])}"),
                            cx=self._across(s.x[i]),
                            cy=f"{y:.1f}",
                            r=3 if s.dots else 1.5,
                            class_=f"dot c{color}",
                        )
                    )
        return out

    def _events(self) -> list[Markup]:
        out = []
        for mark in self.marks:
            x = self._across(mark.x)
            right = self.x.place(mark.x) > 0.8
            out.append(
                tag(
                    "line",
                    tag("title", mark.label),
                    x1=x,
                    x2=x,
                    y1="0",
                    y2=self.plot.height,
                    class_="mark",
                )
            )
            if len(self.marks) <= 3:
                out.append(
                    tag(
                        "text",
                        mark.label,
                        x=x,
                        y="10",
                        dx=-6 if right else 6,
                        class_="tm end" if right else "tm",
                    )
                )
        return out

    def _data(self) -> str:
        """What the page's script needs to show the values under the pointer."""
        height = self.plot.height
        curves = []
        for s, color in zip(self.series, self.colors, strict=True):
            points = [
                [round(self.x.place(x), 4), round(self._down(y) / height, 4), _short(x), _short(y)]
                for x, y in zip(s.x, s.y, strict=True)
                if math.isfinite(self._down(y)) and math.isfinite(x)
            ]
            curves.append({"name": s.name, "color": color, "points": points})
        data = {"x": self.plot.x_label, "unit": self.unit, "curves": curves}
        return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


def _colors(series: Iterable[Series]) -> list[int]:
    """Each series its own colour, as far as there are any."""
    out, free = [], 0
    for s in series:
        out.append((s.color if s.color is not None else free) % COLORS)
        free = max(free, out[-1] + 1)
    return out


def _faint(series: Series) -> str:
    return " faint" if series.faint else ""


def _lonely(y: Sequence[float]) -> list[int]:
    """Points between two gaps, which no line would show."""
    finite = [False, *map(math.isfinite, y), False]
    return [
        i - 1
        for i in range(1, len(finite) - 1)
        if finite[i] and not finite[i - 1] and not finite[i + 1]
    ]


def _short(value: float) -> float:
    return float(f"{value:.5g}") if abs(value) < 1e5 else round(value, 1)
