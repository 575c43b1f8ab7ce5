"""A run seen while it runs: a few lines that stay in place on a terminal, plain lines elsewhere.

The view draws only when it is called, at most four times a second, and starts no thread.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lezero.report.markup import plain
from lezero.report.units import count, number, percent, size, span
from lezero.train.metrics import StepRecord
from lezero.train.trend import Trend, sparkline

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.segment import Segment
    from rich.style import Style

_REFRESH_S = 0.25
_PLAIN_S = 10.0
_WINDOW = 64
_LEVELS = {
    "info": ("·", "dim"),
    "good": ("✓", "green"),
    "warning": ("!", "yellow"),
    "error": ("✗", "bold red"),
}


@dataclass(frozen=True)
class RunInfo:
    """What the view says about the run. `first_step` is the step that a resume goes on from."""

    name: str
    total_steps: int
    first_step: int = 0
    model: str = ""
    precision: str = ""
    device: str = ""
    ranks: int = 1
    forecast_bytes: int | None = None
    forecast_seconds: float | None = None


class LiveView:
    """Shows a run. The trainer calls it on rank 0:

        view.start(info)          once
        view.step(record)         after every optimizer step
        view.event(text, level)   what a person should read; level: info, good, warning, error
        view.stop(summary)        once, also after an error

    On a terminal the newest step stays in place and events scroll by above it. Elsewhere a step is
    one line, written when something happened with it or `plain_seconds` after the last one.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        plain_seconds: float = _PLAIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console

        self.console = console or Console(highlight=False, soft_wrap=True)
        self.fixed = (
            self.console.is_terminal
            and not self.console.is_dumb_terminal
            and self.console.encoding.lower().startswith("utf")
        )
        self._plain_seconds, self._clock = plain_seconds, clock
        self._state: _State | None = None
        self._live: _Area | None = None
        self._shown_at = -math.inf

    def start(self, info: RunInfo) -> None:
        """Begins; a view that was stopped can start again."""
        self.stop()
        self._state = _State(info, self._clock)
        self._shown_at = -math.inf
        if self.fixed:
            with self._safe():
                self._live = _Area(self.console, self._state)
        else:
            self._print(self._state.title())
            if said := self._state.foreseen():
                self._print(said)
        if info.first_step:
            self.event(f"goes on from step {info.first_step:,}")

    def step(self, record: StepRecord) -> None:
        """Takes one step; draws when it is time to."""
        state = self._state
        if state is None:
            return
        state.take(record)
        now = self._clock()
        if record.skipped:
            self.event(f"step {record.step:,} skipped: {record.skipped}", "warning")
        if self._live is not None:
            if now - self._shown_at >= _REFRESH_S:
                self._shown_at = now
                with self._safe():
                    self._live.draw()
        elif now - self._shown_at >= self._plain_seconds or _notable(record, state.info):
            self._shown_at = now
            self._print(state.line())

    def event(self, text: str, level: str = "info") -> None:
        """A message above the view, or a line of its own."""
        sign, style = _LEVELS.get(level, _LEVELS["info"])
        if not self.fixed:
            self._print(f"{'' if level in ('info', 'good') else level + ': '}{plain(text)}")
            return
        from rich.text import Text

        with self._safe():
            self.console.print(Text.assemble((f"{sign} ", style), plain(text)))

    def stop(self, summary: str = "") -> None:
        """Draws the last step, releases the terminal and says `summary`."""
        if self._live is not None:
            with self._safe():
                self._live.close()
            self._live = None
        elif self._state is not None and self._state.unsaid:
            self._print(self._state.line())
        self._state = None
        if summary:
            self.event(summary, "good")

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _print(self, text: str) -> None:
        if self._state is not None:
            self._state.unsaid = False
        encoding = self.console.encoding
        with self._safe():
            self.console.out(text.encode(encoding, "replace").decode(encoding), highlight=False)

    @contextlib.contextmanager
    def _safe(self) -> Iterator[None]:
        """A terminal or pipe that went away silences the view; it never ends a training."""
        if self.console.quiet:
            yield
            return
        try:
            yield
        except (OSError, SystemExit):  # rich leaves with SystemExit when a pipe breaks
            self.console.quiet = True


class _Area:
    """The lines that stay in place, kept there by rich; stdout and stderr go above them."""

    def __init__(self, console: Console, state: _State) -> None:
        from rich.live import Live

        self._live = Live(
            _Picture(state), console=console, auto_refresh=False, vertical_overflow="crop"
        )
        self._live.start()

    def draw(self) -> None:
        self._live.refresh()

    def close(self) -> None:
        self._live.refresh()
        self._live.stop()


class _Picture:
    """Draws the state straight into styled pieces of text; no layout is worked out."""

    def __init__(self, state: _State) -> None:
        from rich.style import Style

        self.state = state
        self.styles: dict[str, Style] = {
            name: Style.parse(name)
            for name in ("bold", "dim", "cyan", "green", "yellow", "red", "bold red")
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        width = options.max_width
        for line in self.state.picture(width):
            yield from self._cut(line, width)
            yield Segment.line()

    def _cut(self, line: list[Piece], width: int) -> list[Segment]:
        """The pieces of one line, cut where it would not fit."""
        from rich.cells import cell_len, set_cell_size
        from rich.segment import Segment

        out, left = [], width
        for text, style in line:
            cells = len(text) if text.isascii() else cell_len(text)
            if cells > left:
                text, cells = set_cell_size(text, left), left
            out.append(Segment(text, self.styles.get(style)))
            left -= cells
        return out


Piece = tuple[str, str]


class _State:
    """What was seen so far, and how it reads."""

    def __init__(self, info: RunInfo, clock: Callable[[], float]) -> None:
        self.info, self.clock = info, clock
        self.record: StepRecord | None = None
        self.unsaid = False
        self.losses = Trend()
        self.intervals: deque[float] = deque(maxlen=_WINDOW)
        self.skipped = 0
        self.validation: float | None = None
        self.best: float | None = None
        self.best_step = 0
        self._last_at: float | None = None

    def take(self, record: StepRecord) -> None:
        now = self.clock()
        if self._last_at is not None:
            self.intervals.append(now - self._last_at)
        self._last_at = now
        self.record, self.unsaid = record, True
        self.losses.add(record.loss)
        self.skipped += record.skipped is not None
        loss = record.validation_loss
        if loss is not None:
            self.validation = loss
            if self.best is None or loss < self.best:
                self.best, self.best_step = loss, record.step

    def left_seconds(self) -> float | None:
        """Seconds to the end by the median time from step to step; one slow step moves it not."""
        if self.record is None:
            return None
        each = statistics.median(self.intervals) if self.intervals else self.record.seconds
        if each is None:
            return None
        return each * max(0, self.record.total_steps - self.record.step)

    def title(self) -> str:
        info = self.info
        ranks = f"{info.ranks} ranks" if info.ranks > 1 else ""
        parts = (info.name, info.model, info.precision, ranks, info.device)
        return plain(" · ".join(part for part in parts if part)).replace("\n", " ")

    def foreseen(self) -> str:
        """What was forecast of a step, "" if nothing was."""
        memory, seconds = self.info.forecast_bytes, self.info.forecast_seconds
        if not memory or not seconds:
            return ""
        rank = " a rank" if self.info.ranks > 1 else ""
        return f"forecast: memory {size(memory)}{rank}, {span(seconds)} a step"

    def line(self) -> str:
        """The newest step as one plain line."""
        r = self.record
        if r is None:
            return ""
        parts = [f"step {r.step:,}/{r.total_steps:,}", f"loss {number(r.loss)}"]
        if r.validation_loss is not None:
            parts.append(f"validation {number(r.validation_loss)}")
        parts += [f"lr {number(r.lr, 3)}"] if r.lr is not None else []
        parts += [f"norm {number(r.grad_norm, 3)}"] if r.grad_norm is not None else []
        parts += [f"{count(r.tokens_per_s)} tokens/s"] if r.tokens_per_s is not None else []
        if r.share_of_ceiling is not None:
            parts.append(f"{percent(r.share_of_ceiling)} of ceiling")
        if r.memory_bytes is not None:
            forecast = self._forecast()
            of = f" of {size(forecast)} forecast" if forecast else ""
            parts.append(f"memory {size(r.memory_bytes)}{of}")
        parts += [f"skipped {self.skipped}"] if self.skipped else []
        left = self.left_seconds()
        parts += [f"{_rough(left)} left"] if left else []
        return "  ".join(parts)

    def picture(self, width: int) -> list[list[Piece]]:
        """The lines of the live area, as pieces of text with a style."""
        lines: list[list[Piece]] = [[("lezero ", "bold"), (self.title(), "dim")]]
        if self.record is None:
            said = self.foreseen()
            lines += [[(said, "dim")]] if said else []
            return [*lines, [("the first step is running", "dim")]]
        r = self.record
        lines += [self._progress(r, width), self._loss(r, width), self._speed(r)]
        lines += [self._memory(r, width)] if r.memory_bytes is not None else []
        return [*lines, self._numbers(r)]

    def _progress(self, r: StepRecord, width: int) -> list[Piece]:
        share = min(1.0, r.step / r.total_steps) if r.total_steps > 0 else 0.0
        left = self.left_seconds()
        text = f" step {r.step:,}/{r.total_steps:,}  {share:.0%}"
        time_left = f"  {_rough(left)} left" if left else ""
        cells = max(0, min(48, width - len(text) - len(time_left)))
        done = round(share * cells)
        bar = [("━" * done, "cyan"), ("━" * (cells - done), "dim")]
        return [*bar, (text, ""), (time_left, "bold")]

    def _loss(self, r: StepRecord, width: int) -> list[Piece]:
        style = "bold" if math.isfinite(r.loss) else "bold red"
        line = [("loss     ", "dim"), (f"{number(r.loss):<9}", style)]
        line.append((sparkline(self.losses.means, min(32, max(0, width - 60))), "cyan"))
        if self.validation is not None:
            line += [("  validation ", "dim"), (number(self.validation), "bold")]
            if self.best is not None and self.best < self.validation:
                line.append((f" (best {number(self.best)} at {self.best_step:,})", "dim"))
        return line

    def _speed(self, r: StepRecord) -> list[Piece]:
        line = [("speed    ", "dim"), (f"{count(r.tokens_per_s)} tokens/s", "")]
        if r.seconds is not None:
            line.append((f"  {span(r.seconds)} a step", ""))
        if r.share_of_ceiling is not None:
            line += [(f"  {percent(r.share_of_ceiling)}", ""), (" of the measured ceiling", "dim")]
        return line

    def _memory(self, r: StepRecord, width: int) -> list[Piece]:
        forecast, now = self._forecast(), r.memory_bytes or 0
        line = [("memory   ", "dim"), (f"{size(now):<11}", "")]
        if forecast:
            share = now / forecast
            style = "green" if share <= 1.0 else "yellow" if share <= 1.1 else "red"
            cells = min(16, max(0, width - 60))
            full = min(cells, round(share * cells))
            line += [("█" * full, style), ("░" * (cells - full), "dim")]
            line += [(f"  {share:.0%}", style), (f" of {size(forecast)} forecast", "dim")]
        return line

    def _numbers(self, r: StepRecord) -> list[Piece]:
        line = [("lr ", "dim"), (number(r.lr, 3), "")]
        line += [("   gradient norm ", "dim"), (number(r.grad_norm, 3), "")]
        style = "yellow" if self.skipped else ""
        return [*line, ("   skipped ", "dim"), (str(self.skipped), style)]

    def _forecast(self) -> int | None:
        given = self.record.forecast_bytes if self.record is not None else None
        return given if given is not None else self.info.forecast_bytes


def _rough(seconds: float) -> str:
    """Time left, no finer than a second."""
    return f"{seconds:.0f} s" if seconds < 59.5 else span(seconds)


def _notable(record: StepRecord, info: RunInfo) -> bool:
    """Steps that plain output always shows."""
    return (
        record.step == info.first_step + 1
        or record.step >= record.total_steps
        or record.validation_loss is not None
    )
