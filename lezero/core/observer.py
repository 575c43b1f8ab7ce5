"""Who watches the collectives of this process: a protocol, and the one that is set, if any."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class Observer(Protocol):
    """Called around every collective that LeZero makes; `lezero.comm.watch` has the real one."""

    def enter(self, op: str, shape: Sequence[int], dtype: Any, label: str) -> None:
        """Before a collective, on the thread that makes it. May raise `DistributedError`."""

    def check(self) -> None:
        """Raises `DistributedError` when another rank was named; for waits that poll."""

    def leave(self) -> None:
        """After one has completed."""

    def explain(self, error: BaseException) -> str | None:
        """What the backend's error about a lost rank means; waits a moment to find out."""

    def close(self, error: BaseException | None = None) -> None:
        """This rank leaves, because of `error` or as it should."""


_current: list[Observer] = []


def current() -> Observer | None:
    return _current[-1] if _current else None


def observe(observer: Observer | None) -> None:
    """Sets the observer of this process; None takes it away."""
    _current[:] = [] if observer is None else [observer]


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """For collectives that ranks rightly make in other numbers than each other, such as the rounds
    of a measurement: inside the block nobody compares them, and a rank that is lost there is told
    of by the backend's error."""
    before = list(_current)
    _current.clear()
    try:
        yield
    finally:
        _current[:] = before
