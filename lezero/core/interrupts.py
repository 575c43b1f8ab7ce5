"""Ctrl-C in work that has to be done as a whole or undone.

Python raises `KeyboardInterrupt` between any two instructions: also within a `finally`, or where a
`with` has begun and has not noted yet what to undo. Within `held_interrupts` it waits for the next
`let_in`, which is called where an error of any kind is undone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NEVER = sys.maxsize
_WAITS_S = 0.05


class _Held:
    """`presses` of Ctrl-C that wait; as many as `most` do not."""

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self.before, self.presses, self.most = before, 0, _NEVER
        self.process = os.getpid()

    def handle(self, number: int, frame: FrameType | None) -> None:
        if _own() is not self:  # given back later by who found it here, or in a child
            self.before(number, frame)
            return
        self.presses += 1
        self.pass_on(self.most, frame)

    def pass_on(self, most: int, frame: FrameType | None = None) -> None:
        """All that wait, if they are as many."""
        if self.presses >= most:
            while self.presses:
                self.presses -= 1
                self.before(signal.SIGINT, frame or sys._getframe())


_held: _Held | None = None


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Ctrl-C waits for `let_in`, or for the end of the block, and then does what it always does.

    Nothing changes outside of the main thread, which is never interrupted, and where Ctrl-C is
    ignored. Within another such block it waits for that one's end.
    """
    global _held
    if _own() is not None:
        with passed_on_at(_NEVER):
            yield
        return
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if main else None
    if not callable(before):
        yield
        return
    held = _Held(before)
    try:
        signal.signal(signal.SIGINT, held.handle)
        _held = held
        yield
    except KeyboardInterrupt:
        held.presses = 0
        raise
    finally:
        held.most = _NEVER  # none is passed on before its handler is back
        try:
            if signal.getsignal(signal.SIGINT) == held.handle:  # or what was set meanwhile stays
                signal.signal(signal.SIGINT, before)
        finally:
            _held = None
        held.pass_on(1)


def let_in() -> None:
    """Passes on a Ctrl-C that waits."""
    held = _own()
    if held is not None:
        held.pass_on(1)


@contextmanager
def passed_on_at(presses: int) -> Iterator[None]:
    """Within the block so many presses of Ctrl-C wait for nothing: 1 around code of the user that
    nothing of ours is open in, 2 where who presses again gives up the rest."""
    held = _own()
    if held is None:
        yield
        return
    before, held.most = held.most, presses
    try:
        yield
    finally:
        held.most = before
        held.pass_on(before)


@contextmanager
def letting_in(lock: threading.Lock) -> Iterator[None]:
    """Holds `lock`; Ctrl-C is let in while it waits for it."""
    while not lock.acquire(timeout=_WAITS_S):
        let_in()
    try:
        yield
    finally:
        lock.release()


def _own() -> _Held | None:
    """What is held, for the main thread of the process that holds it."""
    if _held is None or threading.current_thread() is not threading.main_thread():
        return None
    return _held if _held.process == os.getpid() else None
