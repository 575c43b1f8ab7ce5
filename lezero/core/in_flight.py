"""Collectives in flight that move on only when their own process calls them.

A process that blocks in some other collective meanwhile must go on moving them: else a rank that
waits for one of them first, and this one, wait for each other for ever.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

if TYPE_CHECKING:
    import torch.distributed as dist

_NAP_S, _LONGEST_NAP_S = 5e-5, 1e-3


class Moves(Protocol):
    """Collectives in launch order; used by one thread."""

    def moves(self) -> bool:
        """Takes the steps that can be taken without waiting; whether some are left."""

    def drain(self) -> None:
        """Waits for all of them."""


class _Launched(threading.local):
    def __init__(self) -> None:
        self.here: WeakSet[Moves] = WeakSet()


_launched = _Launched()


def launched(queue: Moves) -> None:
    """This thread has launched collectives of `queue`."""
    _launched.here.add(queue)


def wait(work: dist.Work | None) -> None:
    """Waits for a collective of torch and moves on those that this thread has launched.

    `work` is None where torch had nothing to do.
    """
    if work is None:
        return
    nap = _NAP_S
    while not work.is_completed() and _move():
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP_S)
    block(work)


def block(work: dist.Work) -> None:
    """Waits for a collective of torch alone."""
    work.wait()


def _move() -> bool:
    """Moves all of this thread; whether some are left."""
    return sum(queue.moves() for queue in list(_launched.here)) > 0


def settle() -> None:
    """Waits for all that this thread has launched: before what blocks where nobody can move it."""
    for queue in list(_launched.here):
        if queue.moves():
            queue.drain()
