"""What the ranks print: rank 0 untouched, the others' stderr line by line with their rank in front.

Rank 0 keeps the terminal, so a live view works there. Every other rank writes into a named pipe
that one thread here reads; nothing piles up on disk, and the end of each rank's stderr is kept for
the message about a rank that died.

A line "error: …" waits before it is shown: every rank explains a common error, and the launcher
tells it once. It is shown after all where its rank goes on, or ends without a failure that is told.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
import time
from collections import deque
from pathlib import Path

from lezero.core.log import say

_LINE = 8192
_KEPT = 15
_WAITS_S = 5.0


class Output:
    """The pipes of one launcher. `folder` must exist and be private to it."""

    def __init__(self, folder: Path, ranks: int, show_all: bool) -> None:
        self._tags = dict.fromkeys(range(ranks), "")
        self._tails: dict[int, deque[str]] = {r: deque(maxlen=_KEPT) for r in range(ranks)}
        self._rest: dict[tuple[int, str], bytes] = {}
        self._waiting: deque[tuple[float, str]] = deque()
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._paths: dict[tuple[int, str], str] = {}
        for rank in range(ranks):
            for stream in ("out", "err") if show_all else ("err",):
                path = folder / f"{rank}.{stream}"
                os.mkfifo(path, 0o600)
                # Open for writing too: the pipe then outlives each writer and never ends.
                reader = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                self._selector.register(reader, selectors.EVENT_READ, (rank, stream))
                self._paths[rank, stream] = str(path)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lezero-output", daemon=True)
        self._thread.start()

    def assign(self, ranks: dict[int, int]) -> tuple[dict[int, str], dict[int, str]]:
        """Begins a round: local rank → global rank. Returns the files for stdout and stderr.

        An empty name leaves the stream as it is.
        """
        with self._lock:
            self._show_waiting(0.0)
        for local, rank in ranks.items():
            self._tags[local] = f"[rank {rank}] "
            self._tails[local].clear()
        first = {local for local, rank in ranks.items() if rank == 0}
        outs = {r: "" if r in first else self._paths.get((r, "out"), os.devnull) for r in ranks}
        errs = {r: "" if r in first else self._paths[r, "err"] for r in ranks}
        return outs, errs

    def tail(self, local: int) -> list[str]:
        """The last lines that a rank wrote to its stderr in this round (none for rank 0), for the
        one message about the job; errors that wait to be shown are not shown any more."""
        self._drain()
        with self._lock:
            rest = self._rest.pop((local, "err"), b"")
            if rest:
                self._line(local, "err", rest)
            self._waiting.clear()
            return list(self._tails[local])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._drain()
        for (local, stream), rest in self._rest.items():
            if rest:
                self._line(local, stream, rest)
        self._show_waiting(0.0)
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._drain(0.1)
            with self._lock:
                self._show_waiting(_WAITS_S)

    def _drain(self, wait: float = 0.0) -> None:
        """Reads what is there. `wait` bounds the time spent on waiting for something."""
        ready = self._selector.select(wait)
        while ready:
            with self._lock:
                got = [self._read(key.fd, *key.data) for key, _ in ready]
            ready = self._selector.select(0) if any(got) else []

    def _read(self, fd: int, local: int, stream: str) -> bool:
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(fd, 1 << 16)
        *lines, rest = (self._rest.get((local, stream), b"") + data).split(b"\n")
        for line in lines:
            self._line(local, stream, line)
        if len(rest) > _LINE:
            self._line(local, stream, rest)
            rest = b""
        self._rest[local, stream] = rest
        return bool(data)

    def _line(self, local: int, stream: str, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        tag = self._tags[local]
        told = tag + text.removeprefix(tag)  # LeZero's own messages bear it already
        if stream == "err":
            self._tails[local].append(text)
            if text.startswith("error: "):
                self._waiting.append((time.monotonic(), told))
                return
        say(told, sys.stdout if stream == "out" else sys.stderr)

    def _show_waiting(self, older_s: float) -> None:
        while self._waiting and time.monotonic() - self._waiting[0][0] >= older_s:
            say(self._waiting.popleft()[1])
