"""Events of an answer that have come and that its task has yet to take.

A model writes faster than some clients read a stream, and a request gives its place back once its
answer is made, so what waits for such a client counts as other answers that wait; see `Held`.
Log-probabilities stay with their request, and with an answer that is told whole, until it ends, so
they count until then: twenty at each token take hundreds of times the memory of its text.
"""

from __future__ import annotations

import asyncio
from typing import Self

from lezero.serve.server.held import Held
from lezero.serve.server.worker import Event

_EVENT, _NAMED, _LIKELIEST = 300, 200, 120
"""Bytes that an event takes in memory, a token with its log-probability, and each of the likeliest
in its place."""


class Backlog(asyncio.Queue["Event | None"]):
    """Made and closed in the task that takes the events."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self._held, self._bytes, self._closed = held, 0, False
        self._kept = 0
        """Of the bytes, those of log-probabilities, events that were taken included."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the room back; what comes later is not counted."""
        self._hold(0)
        self._held.end(self._task)
        self._closed = True  # what still comes is dropped with the queue

    def _put(self, event: Event | None) -> None:
        if not self._closed:
            if self.empty():
                self._held.begin(self._task)
            self._kept += _kept(event)
            self._hold(self._bytes + _size(event) + _kept(event))
        super()._put(event)

    def _get(self) -> Event | None:
        event = super()._get()
        self._hold(self._bytes - _size(event))
        if self.empty():
            self._held.end(self._task)
        return event

    def refuse_beyond(self) -> None:
        """Raises `Problem` where log-probabilities make the answer too much, alone or beside
        others."""
        if self._kept:
            self._held.refuse_growth(self._kept, self._bytes)

    def _hold(self, length: int) -> None:
        self._held.bytes += length - self._bytes
        self._bytes = length


def _size(event: Event | None) -> int:
    return 0 if event is None else _EVENT + len(event.text)


def _kept(event: Event | None) -> int:
    if event is None or not event.named:
        return 0
    likeliest = len(event.named[0].logprob.likeliest)
    return len(event.named) * (_NAMED + _LIKELIEST * likeliest)
