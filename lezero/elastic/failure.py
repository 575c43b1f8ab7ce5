"""Why a round of ranks ended: one failure per rank, the first cause among them, and its words."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HINTS = {
    "SIGKILL": "kill -9, or the system ran out of memory",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "a crash in native code",
    "SIGBUS": "a mapped file was cut short, or memory for it ran out",
    "SIGILL": "an instruction this processor does not have",
}


@dataclass(frozen=True)
class Failure:
    """One rank that ended badly. `code` is the exit status, negative for a signal."""

    rank: int
    code: int
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """What a shell would report: the exit status, or 128 and the signal's number."""
        return self.code if self.code > 0 else 128 - self.code

    @property
    def final(self) -> bool:
        """True when starting again cannot help."""
        return bool(self.record.get("final"))

    def reason(self) -> str:
        """What happened, in words that follow "rank 3"."""
        if self.code < 0:
            name = _signal_name(-self.code)
            hint = f" ({_HINTS[name]})" if name in _HINTS else ""
            return f"was killed by {name}{hint}"
        if self.record.get("kind") == "exception":
            text = self.record["text"].strip()
            return f"failed: {self.record['type']}" + (f": {text}" if text else "")
        if self.record.get("text"):
            return f"failed: {self.record['text'].strip()}"
        return f"ended with exit status {self.code}"

    def short(self) -> str:
        """`reason` in one line of bounded length."""
        line = self.reason().splitlines()[0]
        return line if len(line) <= 200 else line[:197] + "..."


def read_record(path: str) -> dict[str, Any]:
    """What a rank wrote about its error; empty when it wrote nothing that can be read."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if "lezero" in data:
            return dict(data["lezero"])
        message = data["message"]  # written by torch's own decorator, `record`
        if isinstance(message, str):
            return {"kind": "exit", "text": message, "time": float(data.get("timestamp", 0))}
        when = float(message["extraInfo"]["timestamp"])
        return {"kind": "exit", "text": str(message["message"]), "time": when}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def first_cause(failures: Iterable[Failure]) -> Failure:
    """The failure that the others follow from.

    A rank killed from outside comes first: the others then fail because it is gone. Among errors
    the earliest counts; ranks that failed without a record come last.
    """

    def order(failure: Failure) -> tuple[bool, float, int]:
        when = float(failure.record.get("time") or "inf")
        return failure.code >= 0, when, failure.rank

    return min(failures, key=order)


def explain(failure: Failure, tail: list[str], spent: str, *, shown: bool, debug: bool) -> str:
    """The one message about a job that ended badly.

    `tail` is the end of the rank's stderr where the launcher saw it; `shown` says that the rank
    wrote to the terminal itself, so what it explained already is not said again.
    """
    record = failure.record
    kind = record.get("kind")
    trace = record.get("full" if debug else "own", "")
    if kind == "user":
        return (trace if debug else "") + f"error: {record['text']}"
    explained = [line for line in tail if line.startswith("error: ")]
    if kind == "exit" and failure.final and (shown or explained):
        return "\n".join(explained)
    text = f"error: rank {failure.rank} {failure.reason()}{spent}"
    if trace:
        head = "" if debug else f"rank {failure.rank}, its own code, most recent call last:\n"
        return f"{head}{trace.rstrip()}\n{text}"
    if shown:
        return f"{text}; its output stands above"
    if tail:
        return "\n".join([text, "the last lines of its stderr:", *(f"  {line}" for line in tail)])
    return text


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
