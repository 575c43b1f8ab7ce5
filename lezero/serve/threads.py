"""The thread that computes, and where the threads lie that help it.

[Note: a core each] OpenMP's threads sleep after some milliseconds without work, and the kernel
chooses a core when they wake. Some kernels put one beside the thread that woke it and now waits for
it, busily: the first step after a pause takes 8 ms more, and beside other busy programs any step
half a second (seen on virtual machines that pack work onto few cores). With a core for each thread
neither happens. That is for a process that does nothing else, with as many threads as cores, and it
is kept where they wake in half the time or less.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lezero.core.facts import usable_cores
from lezero.core.log import logger
from lezero.core.pools import release_pool
from lezero.core.torch_cpu import torch_library

_LOG = logger("serve")
_PAUSE_S, _PAUSES = 0.025, 5
_SLOW_S = 0.001
"""Threads that find a core of their own wake in a tenth to a half of it."""
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_Part = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


@dataclass(frozen=True)
class Placement:
    """Seconds in which threads wake after a pause: where the system puts them, and on a core each
    (None where that was not tried, as they wake quickly)."""

    threads: int
    free_s: float
    own_s: float | None = None

    @property
    def own(self) -> bool:
        """Whether each has a core of its own now."""
        return self.own_s is not None and self.own_s <= self.free_s / 2


def placement_lines(placement: Placement | None) -> list[str]:
    """What was done, for people; nothing where threads lie where the system puts them."""
    if placement is None or not placement.own or placement.own_s is None:
        return []
    free, own = (1000 * seconds for seconds in (placement.free_s, placement.own_s))
    return [
        f"threads     {placement.threads}, a core each: after a pause they wake in {own:.2g} ms, "
        f"{free:.2g} where the system puts them"
    ]


class ComputeThread(threading.Thread):
    """A thread with as many helpers as the one that makes it, and its default device, started by
    `begin`.

    placement: after that, where its threads lie; None where there was nothing to choose.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self.placement: Placement | None = None
        self._count, self._alone, self._ready = torch.get_num_threads(), False, threading.Event()
        self._device = torch.get_default_device()

    def begin(self, alone: bool) -> None:
        """alone: the process does nothing else, so that its threads may have cores of their own;
        finding out takes up to 0.3 s."""
        release_pool()  # of the thread that computed so far, see `pools.py`
        self._alone = alone
        self.start()
        self._ready.wait()

    def run(self) -> None:
        torch.set_num_threads(self._count)  # a thread begins with as many as there are cores
        if self._device.type != "cpu":  # which a thread begins with; asking for it slows every call
            torch.set_default_device(self._device)
        try:
            if self._alone:
                self.placement = place_threads()
        except Exception as error:  # it would answer nobody for that
            _LOG.warning("threads stay where the system puts them: %s", error)
        finally:
            self._ready.set()
        super().run()


def place_threads() -> Placement | None:
    """Puts the calling thread and its helpers on a core each, if they wake in half the time then.

    None where there is nothing to choose: one thread, or fewer than there are cores.
    """
    count = torch.get_num_threads()
    cores = _cores(count)
    if cores is None or len(_each(count, lambda part: None)) < count:
        return None
    free = Placement(count, _wake_s(count))
    if free.free_s < _SLOW_S:
        return free
    moved = _put(cores)
    found = Placement(count, free.free_s, _wake_s(count)) if moved else free
    if not found.own:
        _put([frozenset[int]().union(*cores)] * count)
    return found


def _cores(count: int) -> list[frozenset[int]] | None:
    """`count` sets of processors that do not overlap and are all that this process may use, a core
    or one of its hardware threads each."""
    if count < 2 or not hasattr(os, "sched_setaffinity") or usable_cores() < count:
        return None
    usable = os.sched_getaffinity(0)
    for sets in ({frozenset(_siblings(cpu) & usable) for cpu in usable}, map(_alone, usable)):
        found = sorted(sets, key=min)
        if len(found) == count:
            return found
    return None


def _alone(cpu: int) -> frozenset[int]:
    return frozenset({cpu})


def _siblings(cpu: int) -> set[int]:
    """The hardware threads of a processor's core: "0,4" or "0-1"."""
    try:
        text = Path(_SIBLINGS.format(cpu)).read_text(encoding="ascii")
        ranges = [part.partition("-") for part in text.strip().split(",")]
        return {cpu}.union(*(range(int(a), int(b or a) + 1) for a, _, b in ranges))
    except (OSError, ValueError):
        return {cpu}


def _wake_s(count: int) -> float:
    """Seconds in which all threads do nothing, after a pause: the median of a few."""
    took = []
    for _ in range(_PAUSES):
        time.sleep(_PAUSE_S)
        began = time.perf_counter()
        _each(count, lambda part: None)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def _put(cores: Sequence[frozenset[int]]) -> bool:
    """Whether the system let all threads move: a processor can be taken away meanwhile."""
    moved = set[int]()

    def move(part: int) -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores[part])
            moved.add(part)

    _each(len(cores), move)
    return len(moved) == len(cores)


def _each(count: int, work: Callable[[int], None]) -> set[int]:
    """Calls `work` with 0 to `count` - 1, each in another of this thread's helpers where there are
    as many; gives the threads that there were, none where torch has no such call."""
    run, seen = _parallel(), set[int]()
    if run is None:
        return seen

    def part(begin: int, end: int, _: object) -> None:
        seen.add(threading.get_native_id())
        for index in range(begin, end):
            work(index)

    run(0, count, 1, _Part(part), None)
    return seen


@functools.cache
def _parallel() -> Callable[..., int] | None:
    """torch's own parallel loop, of its stable C interface."""
    run = getattr(torch_library(), "torch_parallel_for", None)
    if run is None:
        return None
    run.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, _Part, ctypes.c_void_p)
    found: Callable[..., int] = run
    return found
