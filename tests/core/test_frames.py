"""Frames of other threads are read without a collection in between, which could end the process."""

from __future__ import annotations

import gc
import os
import sys
import threading

import pytest

from lezero.comm.calls import place_of, position_of, wait_of
from lezero.core.frames import frames_stay
from lezero.parallel.zero.instead import _lent_by_torch

READS = {
    "place": place_of,
    "position": position_of,
    "wait": wait_of,
    "lent": lambda _: _lent_by_torch(None),
}


class Frame:
    """As one of Python's; notes whether a collection could begin while its caller is looked for."""

    def __init__(self, depth: int, collected: list[bool]) -> None:
        self.f_code, self.f_lineno, self.f_lasti = Frame.__init__.__code__, 1, 2
        self._depth, self._collected = depth, collected

    @property
    def f_back(self) -> Frame | None:
        self._collected.append(gc.isenabled())
        return Frame(self._depth - 1, self._collected) if self._depth else None


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python collects between instructions here")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_nothing_is_collected_while_frames_are_read(monkeypatch, read):
    collected: list[bool] = []

    def current_frames() -> dict[int, Frame]:
        collected.append(gc.isenabled())
        return {1: Frame(3, collected)}

    monkeypatch.setattr(sys, "_current_frames", current_frames)
    read(1)
    assert collected
    assert not any(collected)
    assert gc.isenabled()


def test_the_collector_is_left_as_it_was():
    for collects in (True, False, True):
        (gc.enable if collects else gc.disable)()
        with frames_stay(), frames_stay():
            pass
        assert gc.isenabled() is collects


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_is_forked_meanwhile_collects():
    inside, leave = threading.Event(), threading.Event()

    def read() -> None:
        with frames_stay():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=read)
    thread.start()
    inside.wait()
    threading.Timer(0.1, leave.set).start()
    child = os.fork()
    if not child:
        with frames_stay():
            pass
        os._exit(0 if gc.isenabled() else 1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
