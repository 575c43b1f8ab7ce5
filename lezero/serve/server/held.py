"""The memory of answers that are made or on their way, and of bodies that come, over all clients.

A request gives its place back before its answer is read, so that a client that reads slowly keeps
nobody from the model; its answer, or what a stream has yet to send, stays in memory as long.
[Note: slow readers give way] Where answers hold as much as they may, new requests are refused. A
few clients could keep that up for hours, so each refusal cuts off the one that has read for the
longest, if that is longer than a client may leave an answer unread.

[Note: bodies apart] Bodies that are being read have a count of their own: those of clients that
send slowly would else keep others' answers from being made. Only long ones are refused. Of short
ones there are no more than connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lezero.serve.server.problem import Problem

_SHORT = 1 << 16
"""Bytes of a body that is taken whatever others send."""


class Held:
    """most: bytes of all answers beyond which none is begun, and of all bodies beyond which no long
    one is read on. patience_s: see [Note: slow readers give way]."""

    def __init__(self, most: int, patience_s: float) -> None:
        self._most, self._patience_s = most, patience_s
        self.bytes = 0
        """Of answers."""
        self.bodies = 0
        """Bytes of bodies that are being read."""
        self._sending: dict[asyncio.Task[Any], float] = {}

    def refuse_beyond(self, more: int) -> None:
        """Raises `Problem` (503) where an answer of so many bytes is too much beside others; one of
        any size is taken alone."""
        if self._fits(more):
            return
        self._cut_off()
        raise self._full()

    def refuse_body(self, length: int) -> None:
        """Raises `Problem` (503) where others' bodies, beside one that has come so far and is
        counted, take as much as may be read; see [Note: bodies apart]."""
        if length > _SHORT and self.bodies - length > self._most:
            problem = f"bodies of {self.bodies >> 10} KiB are being read, as many as may"
            raise Problem(503, f"{problem}; try again later", code="overloaded", retry_s=1)

    def refuse_growth(self, own: int, whole: int) -> None:
        """The same for an answer that is on its way and counted with `whole` bytes, of which `own`
        stay until it ends; 400 where these alone are too much, so that it is of no use to ask
        again. Where another one is being cut off, whose room comes back at once, it goes on."""
        if own > self._most:
            raise Problem(
                400,
                f"logprobs: those of this answer take more than {self._most >> 10} KiB until it "
                "ends; ask for fewer tokens (n times max_tokens) or fewer log-probabilities",
                param="logprobs",
            )
        alone = self.bytes <= whole
        if not (alone or self._fits(0) or self._is_cutting_off() or self._cut_off()):
            raise self._full()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Around the sending of an answer, which may take the client's time."""
        task = asyncio.current_task()
        assert task is not None
        self.begin(task)
        try:
            yield
        finally:
            self.end(task)

    def begin(self, task: asyncio.Task[Any]) -> None:
        """Notes that from now on there is something that `task` has yet to send."""
        self._sending[task] = asyncio.get_running_loop().time()

    def end(self, task: asyncio.Task[Any]) -> None:
        """Notes that it has nothing to send."""
        self._sending.pop(task, None)

    def _fits(self, more: int) -> bool:
        return not self.bytes or self.bytes + more <= self._most

    def _full(self) -> Problem:
        problem = f"answers of {self.bytes >> 10} KiB are made or wait to be read, as many as may"
        return Problem(503, f"{problem}; try again later", code="overloaded", retry_s=1)

    def _is_cutting_off(self) -> bool:
        return any(task.cancelling() for task in self._sending)

    def _cut_off(self) -> bool:
        """Whether there was somebody to be cut off."""
        before = asyncio.get_running_loop().time() - self._patience_s
        for task, since in self._sending.items():  # the oldest comes first
            if since < before and not task.cancelling():
                task.cancel()
                return True
        return False
