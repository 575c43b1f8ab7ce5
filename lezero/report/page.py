"""A page: one HTML file with everything in it, which opens offline.

[Note: nothing runs that is not ours]
All text is escaped. Besides, the page's content security policy allows no network, and only the one
style sheet and the one script whose digests it names, so even markup that slipped through could
neither load nor run anything.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lezero.core.errors import FileError
from lezero.core.paths import expand_home
from lezero.report.markup import Markup, join, tag


class Drawn(Protocol):
    """Anything that draws itself: `LinePlot`, `BarPlot`."""

    def render(self) -> Markup: ...


@dataclass(frozen=True)
class Tile:
    """One key figure. tone: "" or "good", "warn", "bad", which colour its note."""

    label: str
    value: str
    note: str = ""
    tone: str = ""


class Section:
    """One part of a page; its methods add content in order. All text given is shown as it is."""

    def __init__(self, title: str, name: str) -> None:
        self.title, self.name = title, name
        self.parts: list[Markup] = []

    def text(self, *children: object) -> None:
        """A paragraph."""
        self.parts.append(tag("p", *children))

    def note(self, *children: object, tone: str = "") -> None:
        """A remark in a box. tone as in `Tile`."""
        self.parts.append(tag("p", *children, class_=f"note {_tone(tone)}".strip()))

    def missing(self, what: str) -> None:
        """Says what is not there."""
        self.parts.append(tag("p", what, class_="missing"))

    def plots(self, *plots: Drawn) -> None:
        """Plots beside each other where the page is wide enough."""
        wide = "" if len(plots) > 1 else " wide"
        self.parts.append(tag("div", *(p.render() for p in plots), class_=f"plots{wide}"))

    def table(
        self, headers: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: str = ""
    ) -> None:
        """A table. `numbers` has one letter a column, "n" for figures (aligned right): "-nn"."""
        kinds = ["n" if i < len(numbers) and numbers[i] == "n" else None for i in range(64)]

        def line(kind: str, cells: Sequence[object]) -> Markup:
            return tag("tr", *(tag(kind, c, class_=kinds[i % 64]) for i, c in enumerate(cells)))

        head = tag("thead", line("th", headers))
        body = tag("tbody", *(line("td", row) for row in rows))
        self.parts.append(tag("div", tag("table", head, body), class_="scroll"))

    def facts(self, facts: Mapping[str, object]) -> None:
        """Names with their values."""
        pairs = [tag("div", tag("dt", k), tag("dd", v)) for k, v in facts.items()]
        self.parts.append(tag("dl", *pairs, class_="facts"))

    def code(self, text: str, *, title: str | None = None, open: bool = True) -> None:
        """Text as it is, in a fixed-width block; with a title, one that can be folded away."""
        block = tag("pre", tag("code", text))
        if title is not None:
            state = "open" if open else None
            block = tag("details", tag("summary", title), block, open=state)
        self.parts.append(block)

    def add(self, *markup: Markup) -> None:
        """Markup made with `tag`."""
        self.parts += markup

    def render(self) -> Markup:
        return tag("section", tag("h2", self.title), *self.parts, id=self.name)


class Page:
    """A self-contained HTML page.

    >>> page = Page("Run a")
    >>> page.tiles([Tile("loss", "2.03")])
    >>> page.section("Speed").text("12,345 tokens/s")
    >>> html = page.render()
    """

    def __init__(self, title: str, subtitle: str = "", footer: str = "") -> None:
        self.title, self.subtitle, self.footer = title, subtitle, footer
        self.sections: list[Section] = []
        self._tiles: list[Tile] = []

    def tiles(self, tiles: Iterable[Tile]) -> None:
        """Key figures, shown at the top."""
        self._tiles += tiles

    def section(self, title: str) -> Section:
        """A new section at the end of the page."""
        made = Section(title, f"s{len(self.sections) + 1}")
        self.sections.append(made)
        return made

    def render(self) -> str:
        """The whole page as text."""
        style, script = _asset("page.css"), _asset("page.js")
        policy = (
            f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; "
            f"script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'"
        )
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("link", rel="icon", href="data:,"),
            tag("title", self.title),
            tag("style", Markup(style)),
        )
        body = tag(
            "body",
            tag("header", tag("h1", self.title), self._subtitle(), self._contents()),
            tag("main", self._tile_row(), *(s.render() for s in self.sections)),
            tag("footer", self.footer) if self.footer else "",
            tag("script", Markup(script)),
        )
        return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page whole or not at all (aside, then renamed) and returns its path.

        Raises `FileError` when it cannot be written.
        """
        target = Path(expand_home(path))
        made = target.with_name(f".tmp-{target.name}-{secrets.token_hex(4)}")
        try:
            with open(made, "xb") as file:
                file.write(self.render().encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
            os.replace(made, target)
        except OSError as error:
            raise FileError(f"{target}: the page cannot be written ({error.strerror})") from error
        finally:
            with suppress(OSError):
                made.unlink(missing_ok=True)
        return target

    def _subtitle(self) -> Markup | str:
        return tag("p", self.subtitle, class_="subtitle") if self.subtitle else ""

    def _contents(self) -> Markup | str:
        if len(self.sections) < 3:
            return ""
        return tag("nav", *(tag("a", s.title, href=f"#{s.name}") for s in self.sections))

    def _tile_row(self) -> Markup | str:
        made = [
            tag(
                "div",
                tag("span", tile.label, class_="label"),
                tag("strong", tile.value),
                tag("span", tile.note, class_=f"small {_tone(tile.tone)}".strip())
                if tile.note
                else "",
                class_="tile",
            )
            for tile in self._tiles
        ]
        return tag("div", *made, class_="tiles") if made else join()


def _tone(tone: str) -> str:
    return tone if tone in ("good", "warn", "bad") else ""


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
