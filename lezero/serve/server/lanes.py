"""Threads for what takes long, so that the event loop goes on and short texts pass long ones.

Finding the tokens of a megabyte of text takes a second, and so does writing a long answer as JSON.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lezero.serve.server.problem import Problem

Value = TypeVar("Value")
_BRIEF, _LONG = 1 << 12, 1 << 14
"""Lengths below which the event loop waits, and from which on short work does not."""


class Lane:
    """One thread, which takes one piece of work after another."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.active = 0
        """Pieces of work that somebody waits for."""
        self._began: float | None = None

    def run(self, work: Callable[[], Value]) -> asyncio.Future[Value]:
        """What `work` gives. Cancelling it before its turn gives the turn up."""
        self.active += 1
        going = asyncio.get_running_loop().run_in_executor(self._pool, self._run, work)
        going.add_done_callback(self._ended)
        return going

    def refuse_beyond(self, most: int) -> None:
        """Raises `Problem` (429) where so many wait behind the one that runs."""
        if self.active > most:
            problem = f"too busy: {self.active} requests are being read; try again later"
            raise Problem(429, problem, code="queue_full", retry_s=1)

    def stalled_s(self) -> float:
        """How long the work takes that runs now, also where nobody waits for it any more."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """Forgets what waits, and ends the thread after what runs."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, work: Callable[[], Value]) -> Value:
        self._began = time.monotonic()
        try:
            return work()
        except Exception:
            raise
        except BaseException as error:  # a panic of tokenizers would end the event loop
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            self._began = None

    def _ended(self, going: object) -> None:
        self.active -= 1


class Lanes:
    """One lane for short work and one for long. name: of the threads."""

    def __init__(self, name: str) -> None:
        self._short, self._long = Lane(f"{name}-short"), Lane(f"{name}-long")

    def of(self, length: int) -> Lane:
        """The lane of work on so many letters, tokens, numbers or bytes."""
        return self._short if length < _LONG else self._long

    async def write(self, length: int, work: Callable[[], Value]) -> Value:
        """What `work` gives for an answer of so many letters, tokens or numbers; at once where it
        is so short that another thread would take longer."""
        return work() if length < _BRIEF else await self.of(length).run(work)

    def stalled_s(self) -> float:
        return max(self._short.stalled_s(), self._long.stalled_s())

    def close(self) -> None:
        self._short.close()
        self._long.close()
