"""Ctrl-C in work that has to be done as a whole or undone.

Python raises `KeyboardInterrupt` between any two instructions: also within a `finally`, or where a
`with` has begun and has not noted yet what to undo. Within `held_interrupts` it waits for the next
`let_in`, which is called where an error of any kind is undone.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NEVER = sys.maxsize


class _Held:
    """`presses` of Ctrl-C that wait; as many as `most` do not."""

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self.before, self.presses, self.most = before, 0, _NEVER

    def handle(self, _number: int, frame: FrameType | None) -> None:
        self.presses += 1
        if self.presses >= self.most:
            self.pass_on(frame)

    def pass_on(self, frame: FrameType | None) -> None:
        self.presses = 0
        self.before(signal.SIGINT, frame)


_held: _Held | None = None


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Ctrl-C waits for `let_in`, or for the end of the block, and then does what it always does.

    Nothing changes outside of the main thread, which is never interrupted, where Ctrl-C is ignored,
    and within a block of this kind.
    """
    global _held
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if main else None
    if _held is not None or not callable(before):
        yield
        return
    held = _held = _Held(before)
    signal.signal(signal.SIGINT, held.handle)
    try:
        yield
    finally:
        _held = None
        signal.signal(signal.SIGINT, before)
        if held.presses:
            held.pass_on(sys._getframe())


def let_in() -> None:
    """Passes on a Ctrl-C that waits."""
    held = _own()
    if held is not None and held.presses:
        held.pass_on(sys._getframe())


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


def _own() -> _Held | None:
    """What is held, for the main thread."""
    return _held if threading.current_thread() is threading.main_thread() else None
