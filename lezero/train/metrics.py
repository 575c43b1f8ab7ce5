"""What a run measures, one JSON object a line in `metrics.jsonl`.

    {"step": 412, "loss": 2.0312, "lr": 0.0003, "tokens": 2048, …, "time": 1764000000.123}
    {"event": "resume", "step": 400, "text": "resumed from step 400", "changed": false, "time": …}

[Note: a file that a kill cannot spoil]
Each line is one `write` to the end of the file. A kill can tear the last line only; the next writer
starts a new line after it, and the reader skips what it cannot read and counts it. When a run goes
back (a resume event, or a step number that does not rise) the reader drops the old rows above, and
after a resume event what happened with these steps, too. At an event `begin`, of a run that starts
anew in the folder of another, it drops all of that, but for its notes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lezero.core.errors import FileError, need_extra
from lezero.core.log import logger
from lezero.core.paths import expand_home, open_regular

BEGIN, RESUME = "begin", "resume"
_OF_STEPS = {"checkpoint", "skipped", "validation"}
"""Events that are void with their step."""
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_OLD_NAMES = {"memory": "memory_bytes"}
_MAX_LINE, _MAX_COLUMNS = 1 << 20, 64

log = logger("metrics")


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step as it is shown and stored; what is not known is None.

    `tokens` are those of this step over all ranks, `seconds` its wall time, `memory_bytes` the
    peak memory of this rank in this step, above imports, `forecast_bytes` the forecast of it,
    `share_of_ceiling` the model's FLOP/s over the measured GEMM ceiling (0 to 1), `skipped` why no
    update was made, `validation_loss` the loss of a validation that followed this step.
    """

    step: int
    total_steps: int
    loss: float
    lr: float | None = None
    grad_norm: float | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    seconds: float | None = None
    memory_bytes: int | None = None
    forecast_bytes: int | None = None
    share_of_ceiling: float | None = None
    skipped: str | None = None
    validation_loss: float | None = None


class MetricsWriter:
    """Appends to `metrics.jsonl`. For one process only: the caller opens it on rank 0.

    A disk that is full or gone never ends a training: the first failure is reported, `error` holds
    the last one, and writing goes on with the next line.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(expand_home(path))
        self.error: OSError | None = None
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise FileError(f"{self.path}: cannot be written ({error.strerror})") from error
        self._torn = not _ends_whole(self._file)
        self.goes_on = os.fstat(self._file).st_size > 0
        """Whether the file held something before."""

    def step(self, record: StepRecord) -> None:
        """Appends one step. A loss that is not finite becomes null, named in "nonfinite"."""
        line = {k: v for k, v in asdict(record).items() if v is not None}
        self._append(line)

    def event(
        self, event: str, *, step: int | None = None, text: str | None = None, **more: object
    ) -> None:
        """Appends something that happened: "resume", "checkpoint", "skipped", "validation", …

        `resume` needs its step: what the file holds above that step is void from here on. At
        `begin` all of it is.
        """
        if event == RESUME and step is None:
            raise ValueError("a resume event needs the step that the run goes on from")
        line = {"event": event, "step": step, "text": text, **more}
        self._append({k: v for k, v in line.items() if v is not None})

    def close(self) -> None:
        """Makes the file durable and closes it. A second call does nothing."""
        if self._file >= 0:
            try:
                os.fsync(self._file)
            except OSError as error:
                self._failed(error)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, line: dict[str, Any]) -> None:
        line["time"] = round(time.time(), 3)
        start = "\n" if self._torn else ""
        data = f"{start}{_encode(line)}\n".encode()
        try:
            written = os.write(self._file, data)
            self._torn = written < len(data)
        except OSError as error:
            self._torn = True
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        if self.error is None:
            log.warning(
                "%s: cannot be written (%s); training goes on, but lines of it are missing",
                self.path,
                error.strerror,
            )
        self.error = error


@dataclass
class Metrics:
    """What a `metrics.jsonl` holds: one row a step in order of steps, and the events in order.

    `torn` counts the lines that could not be read. A figure that a step lacks is NaN.
    """

    columns: dict[str, array[float]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    skipped: dict[int, str] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    torn: int = 0

    def column(self, name: str) -> array[float]:
        """The figure `name` of each step."""
        return self.columns.get(name) or array("d", [math.nan]) * len(self.steps)

    def known(self, name: str) -> tuple[list[int], list[float]]:
        """The steps that have the figure `name`, and it."""
        pairs = [
            (step, value)
            for step, value in zip(self.steps, self.column(name), strict=True)
            if not math.isnan(value)
        ]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def happened(self, event: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [item for item in self.events if item.get("event") == event]

    def __len__(self) -> int:
        return len(self.steps)


def read_metrics(path: str | os.PathLike[str]) -> Metrics:
    """Reads a `metrics.jsonl`, also while a run writes it.

    Raises `FileError` when the file is missing or unreadable.
    """
    reader = _Reader()
    try:
        with open_regular(expand_home(path)) as file:
            for line in iter(lambda: file.readline(_MAX_LINE), b""):
                reader.take(line)
    except OSError as error:
        raise FileError(f"{os.fspath(path)}: cannot be read ({error.strerror})") from error
    return reader.finish()


class _Reader:
    """Rows as they come, in columns, so that a long run fits in memory; steps only ever rise."""

    def __init__(self) -> None:
        self.made = Metrics()

    def take(self, line: bytes) -> None:
        if not line.strip():
            return
        if not line.endswith(b"\n"):  # still being written, or torn by a kill
            self.made.torn += 1
            return
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict) or not self._kept(data):
            self.made.torn += 1

    def _kept(self, data: dict[str, Any]) -> bool:
        step = data.get("step")
        whole = isinstance(step, int) and not isinstance(step, bool)
        if "event" in data:
            if not isinstance(data["event"], str) or not (whole or step is None):
                return False
            if data["event"] == RESUME and isinstance(step, int):
                self._leave(step, _OF_STEPS)
            elif data["event"] == BEGIN:
                self._leave(-1, {*_OF_STEPS, RESUME})
            self.made.events.append(data)
        elif isinstance(step, int) and whole:
            self._void(step)
            self._row(step, data)
        else:
            return False
        return True

    def _leave(self, step: int, kinds: set[str]) -> None:
        """Forgets what the file holds of the steps after this one, events of these kinds too."""
        self._void(step + 1)
        self.made.events = [
            event
            for event in self.made.events
            if event["event"] not in kinds or (event.get("step") or 0) <= step
        ]

    def _void(self, step: int) -> None:
        """Forgets the rows from `step` on: the run went back."""
        made = self.made
        if not made.steps or made.steps[-1] < step:
            return
        cut = bisect_left(made.steps, step)
        del made.steps[cut:]
        for column in made.columns.values():
            del column[cut:]
        made.skipped = {s: why for s, why in made.skipped.items() if s < step}

    def _row(self, step: int, data: dict[str, Any]) -> None:
        row = len(self.made.steps)
        self.made.steps.append(step)
        odd = data.get("nonfinite")
        for name, value in data.items():
            if value is None and isinstance(odd, dict):
                value = _NONFINITE.get(str(odd.get(name)))
            if isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
                self._put(_OLD_NAMES.get(name, name), row, _float(value))
        if isinstance(data.get("skipped"), str):
            self.made.skipped[step] = data["skipped"]

    def _put(self, name: str, row: int, value: float) -> None:
        columns = self.made.columns
        if name not in columns and len(columns) >= _MAX_COLUMNS:
            return
        column = columns.setdefault(name, array("d"))
        column.extend([math.nan] * (row + 1 - len(column)))
        column[row] = value

    def finish(self) -> Metrics:
        for column in self.made.columns.values():
            column.extend([math.nan] * (len(self.made.steps) - len(column)))
        return self.made


def require_tensorboard() -> Any:
    """torch's writer for TensorBoard; `MissingExtraError` where the package is not there."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise need_extra("tensorboard", "tensorboard", "TensorBoard output") from error
    return SummaryWriter


class TensorBoardSink:
    """Writes the same records for TensorBoard. Needs the extra "tensorboard"; rank 0 only.

    What an earlier process wrote above the step `resumed_at`, all of it with None, is hidden. A
    disk that is full or gone never ends a training: it is reported, and no more is written.
    """

    def __init__(self, folder: str | os.PathLike[str], resumed_at: int | None = None) -> None:
        purge = (resumed_at or 0) + 1
        writer = require_tensorboard()
        self._writer: Any = None
        with self._guarded():
            self._writer = writer(os.fspath(folder), purge_step=purge)

    def step(self, record: StepRecord) -> None:
        if self._writer is None:
            return
        with self._guarded():
            for name, figure in _BOARD.items():
                value = getattr(record, figure)
                if value is not None:
                    self._writer.add_scalar(name, value, record.step)

    def validation(self, step: int, loss: float) -> None:
        """A validation of a step that was written before it."""
        if self._writer is not None:
            with self._guarded():
                self._writer.add_scalar("loss/validation", loss, step)

    def event(self, text: str, step: int) -> None:
        if self._writer is not None:
            with self._guarded():
                self._writer.add_text("events", text, step)

    def close(self) -> None:
        if self._writer is not None:
            with self._guarded():
                self._writer.close()
            self._writer = None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.warning("TensorBoard's events are written no more: %s", error.strerror or error)
            self._writer = None


_BOARD = {
    "loss/train": "loss",
    "loss/validation": "validation_loss",
    "step/learning rate": "lr",
    "step/gradient norm": "grad_norm",
    "step/seconds": "seconds",
    "speed/tokens per second": "tokens_per_s",
    "speed/share of ceiling": "share_of_ceiling",
    "memory/bytes": "memory_bytes",
}


def _encode(line: dict[str, Any]) -> str:
    """JSON that every parser reads: NaN and infinities become null, named in "nonfinite"."""
    odd = {k: str(v) for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)}
    if odd:
        line = {**line, **dict.fromkeys(odd), "nonfinite": odd}
    try:
        return json.dumps(line, separators=(",", ":"), allow_nan=False, default=str)
    except (ValueError, TypeError):  # something odd deep inside an event
        return json.dumps({k: v if isinstance(v, int | float) else str(v) for k, v in line.items()})


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _ends_whole(file: int) -> bool:
    end = os.lseek(file, 0, os.SEEK_END)
    return end == 0 or os.pread(file, 1, end - 1) == b"\n"
