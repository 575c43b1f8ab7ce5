"""Where the threads of a server lie, and that they are given back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from lezero.core.facts import usable_cores
from lezero.core.pools import release_pool
from lezero.serve import threads
from lezero.serve.threads import ComputeThread, Placement, place_threads, placement_lines

needs_cores = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or usable_cores() < 2, reason="needs Linux and two cores"
)


@pytest.fixture
def all_cores() -> Iterator[int]:
    """torch computes with a thread for each core."""
    before = torch.get_num_threads()
    count = len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


def in_thread(work: Callable[[], None]) -> ComputeThread:
    """Runs `work` where threads may have cores of their own, to its end."""
    made = ComputeThread(lambda: (work(), release_pool())[0], "test-compute")
    made.begin(alone=True)
    made.join()
    return made


def masks(count: int) -> list[set[int]]:
    """Where each of the calling thread's helpers may run."""
    found: dict[int, set[int]] = {}
    threads._each(count, lambda part: found.update({part: os.sched_getaffinity(0)}))
    return [found[part] for part in range(count)]


def answers(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    left = iter(seconds)
    monkeypatch.setattr(threads, "_wake_s", lambda count: next(left))


@needs_cores
def test_each_thread_has_its_core_where_it_wakes_sooner(monkeypatch, all_cores: int) -> None:
    answers(monkeypatch, 0.008, 0.001)
    usable, seen = os.sched_getaffinity(0), list[set[int]]()
    made = in_thread(lambda: seen.extend(masks(all_cores)))
    assert made.placement == Placement(all_cores, 0.008, 0.001)
    assert made.placement.own
    assert set().union(*seen) == usable
    assert sum(map(len, seen)) == len(usable), "no core is given twice"
    assert os.sched_getaffinity(0) == usable, "other threads may go where they like"


@needs_cores
@pytest.mark.parametrize("seconds", [(0.0009,), (0.008, 0.005)], ids=["quick", "no quicker"])
def test_else_they_stay_where_the_system_puts_them(monkeypatch, all_cores: int, seconds) -> None:
    answers(monkeypatch, *seconds)
    usable, seen = os.sched_getaffinity(0), list[set[int]]()
    made = in_thread(lambda: seen.extend(masks(all_cores)))
    assert made.placement == Placement(all_cores, *seconds)
    assert not made.placement.own
    assert seen == [usable] * all_cores


@needs_cores
def test_waking_is_measured_after_pauses(monkeypatch, all_cores: int) -> None:
    monkeypatch.setattr(threads, "_PAUSE_S", 0.001)
    assert 0 < threads._wake_s(all_cores) < 1


@needs_cores
def test_a_thread_that_may_not_move_leaves_all_where_they_were(monkeypatch, all_cores: int) -> None:
    answers(monkeypatch, 0.008)
    usable, seen, move = os.sched_getaffinity(0), list[set[int]](), os.sched_setaffinity
    taken = max(usable)

    def refuse(thread: int, cores: frozenset[int]) -> None:
        if cores == {taken}:
            raise OSError(22, "Invalid argument")
        move(thread, cores)

    monkeypatch.setattr(threads.os, "sched_setaffinity", refuse)
    monkeypatch.setattr(threads, "_siblings", lambda cpu: {cpu})
    made = in_thread(lambda: seen.extend(masks(all_cores)))
    assert made.placement == Placement(all_cores, 0.008)
    assert seen == [usable] * all_cores


def test_a_process_that_does_more_keeps_its_threads_free(monkeypatch) -> None:
    monkeypatch.setattr(threads, "place_threads", lambda: pytest.fail("asked for"))
    made = ComputeThread(lambda: None, "test-compute")
    made.begin(alone=False)
    made.join()
    assert made.placement is None


def test_a_thread_works_also_where_its_cores_are_not_found(monkeypatch, caplog) -> None:
    def fails() -> None:
        raise RuntimeError("no such call")

    monkeypatch.setattr(threads, "place_threads", fails)
    done = threading.Event()
    made = ComputeThread(done.set, "test-compute")
    made.begin(alone=True)
    made.join()
    assert done.is_set()
    assert made.placement is None
    assert "no such call" in caplog.text


def test_fewer_threads_than_cores_leave_the_system_its_choice(monkeypatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(threads, "_siblings", lambda cpu: {cpu % 4, cpu % 4 + 4})
    assert threads._cores(1) is None
    assert threads._cores(3) is None
    assert threads._cores(4) == [frozenset({cpu, cpu + 4}) for cpu in range(4)]
    assert threads._cores(8) == [frozenset({cpu}) for cpu in range(8)]
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)  # a quota of the control group
    assert threads._cores(4) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [("3\n", {3}), ("3,7", {3, 7}), ("2-3", {2, 3}), ("", {3}), ("three", {3}), (None, {3})],
)
def test_siblings_are_read(monkeypatch, tmp_path, text, found) -> None:
    if text is not None:
        (tmp_path / "3").write_text(text)
    monkeypatch.setattr(threads, "_SIBLINGS", str(tmp_path / "{}"))
    assert threads._siblings(3) == found


def test_without_the_call_of_torch_there_is_no_choice(monkeypatch) -> None:
    monkeypatch.setattr(threads, "_parallel", lambda: None)
    assert place_threads() is None


def test_people_are_told_of_cores_of_their_own_only() -> None:
    assert placement_lines(None) == placement_lines(Placement(2, 0.0003)) == []
    assert placement_lines(Placement(2, 0.008, 0.007)) == []
    (line,) = placement_lines(Placement(2, 0.0078, 0.00036))
    assert "0.36 ms, 7.8 where the system puts them" in line
