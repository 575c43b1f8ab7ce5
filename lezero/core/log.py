"""Logging that knows its rank: everything goes through `logger(name)`.

Rank 0 logs from the level of `LEZERO_LOG` up; other ranks only from warnings up, with their rank in
front, so that one message is not printed once a rank. Importing LeZero configures nothing: the
handler is attached on the first message and only if the application has set up none of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import IO, Any

from lezero.core.flags import flag

ROOT = "lezero"


class _RankFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        given = os.environ.get("RANK", "")
        rank = int(given) if given.isdecimal() else 0  # what it cannot be, others say
        record.rank = f"[rank {rank}] " if rank else ""
        return rank == 0 or record.levelno >= logging.WARNING


class _StderrHandler(logging.Handler):
    """Writes to whatever `sys.stderr` is now, so that capturing and redirecting work."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            self.handleError(record)


class _Logger(logging.LoggerAdapter[logging.Logger]):
    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        _configure()
        super().log(level, msg, *args, **kwargs)


def logger(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """The logger of one part of LeZero, for example `logger("checkpoint")`."""
    return _Logger(logging.getLogger(f"{ROOT}.{name}"), {})


def say(text: str, stream: IO[str] | None = None) -> None:
    """Prints a line for the user (to stderr); that nobody reads any more is no reason to stop.

    The line and its end go in one call, for the ranks of a job share a terminal and `print` to
    stderr makes two.
    """
    stream = stream or sys.stderr
    known = getattr(stream, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):
        stream.write(text.encode(known, "backslashreplace").decode(known) + "\n")
        stream.flush()


def _configure() -> None:
    root = logging.getLogger(ROOT)
    if root.handlers or logging.getLogger().handlers:
        return
    handler = _StderrHandler()
    handler.addFilter(_RankFilter())
    handler.setFormatter(logging.Formatter("%(rank)slezero: %(message)s"))
    root.addHandler(handler)
    root.setLevel(str(flag("LEZERO_LOG")).upper())
    root.propagate = False
