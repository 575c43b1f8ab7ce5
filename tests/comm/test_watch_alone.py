"""What the watch of one rank does, without others that listen."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from lezero.comm import watch as watching
from lezero.comm.calls import place_of, position_of
from lezero.comm.pending import Arrived
from lezero.comm.verdict import RUNS
from lezero.comm.watch import Watch
from lezero.core import in_flight


@pytest.fixture
def alone():
    """A watch of a rank that nobody listens to."""
    return Watch(SimpleNamespace(rank=0, world=1, send=lambda message, to: None), 30.0, 10.0)


def test_a_long_phase_inside_another_one_leaves_that(alone):
    with alone.busy("evaluates"):
        before = alone._state, alone._doing, alone._since
        with alone.busy("compiles"):
            assert alone._doing == "compiles"
        assert (alone._state, alone._doing, alone._since) == before
    assert (alone._state, alone._doing) == ("runs", "")


@pytest.mark.parametrize("end", [lambda watch: watch.failed(ValueError("no")), Watch.finished])
def test_a_rank_that_goes_on_has_not_ended(alone, end):
    enter = ("all_reduce", (4,), torch.float32, "x")
    for _ in range(12):  # by then it is usual
        alone.enter(*enter)
    end(alone)
    assert alone._state != "runs"
    alone.enter(*enter)
    assert (alone._state, alone._doing) == ("runs", "")


class Lost:
    """A collective of the backend that never ends, as one whose send Gloo has lost."""

    def __init__(self, come, gate):
        self.come, self.gate = come, gate

    def is_completed(self):
        return False

    def wait(self):
        self.come.set()
        self.gate.wait()


@pytest.mark.parametrize("goes_to", ["", "its own work", "in_flight.wait", "Arrived.block"])
def test_only_a_thread_that_is_held_is_ended(alone, monkeypatch, goes_to):
    gates, come, ended = [threading.Event(), threading.Event()], threading.Event(), []
    lost = Lost(come, gates[1])

    def own_work():
        come.set()
        while not gates[1].is_set():
            time.sleep(0.001)

    onward = {
        "": gates[1].wait,
        "its own work": own_work,
        "in_flight.wait": lambda: in_flight.wait(lost),
        "Arrived.block": lambda: Arrived(lost).block(0.0),
    }

    def held():
        gates[0].wait()
        onward[goes_to]()

    monkeypatch.setattr(os, "_exit", ended.append)
    with ThreadPoolExecutor(1) as pool:
        alone._thread_watched = pool.submit(threading.get_ident).result()
        waiting = pool.submit(held)
        while "test_watch" not in place_of(alone._thread_watched):
            time.sleep(0.001)
        alone._entered = 1
        alone._held = position_of(alone._thread_watched), 0.0
        if goes_to:
            gates[0].set()
            come.wait()
        for late in (1.0, 2.0):  # it is seen there first
            alone._enforce(late * alone._grace_s + late)
        for gate in gates:
            gate.set()
        waiting.result()
    free = goes_to == "its own work"
    assert bool(ended) is not free
    assert set(ended) <= {watching.EXIT_STATUS}


def test_asking_takes_no_more_than_its_share(alone, monkeypatch):
    asked = []

    def ask(number):
        asked.append(number)
        alone._asking_s += 0.75 * watching._START_S

    monkeypatch.setattr(alone, "_ask", ask)
    for number in range(8):
        alone.enter("all_reduce", (number,), torch.float32, "x")
    assert asked == [1, 2]


def test_a_rank_that_is_merely_late_is_waited_for_briefly_and_counts_little(alone, monkeypatch):
    late = SimpleNamespace(entered=0, state=RUNS)
    monkeypatch.setattr(alone._judge, "present", lambda: [late])
    began = time.monotonic()
    with alone._news:
        alone._ask(1)
    assert watching._ASK_S <= time.monotonic() - began < 10 * watching._ASK_S
    assert alone._asking_s == watching._LATE_S
