"""Ctrl-C waits where it would leave something half done."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lezero.core import interrupts
from lezero.core.interrupts import held_interrupts, let_in, letting_in, passed_on_at

Steps = list[object]


@pytest.fixture(autouse=True)
def as_it_was(ctrl_c: None) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before
    assert interrupts._held is None


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def pressed_and_let_in(done: Steps) -> None:
    with held_interrupts():
        press()
        press()
        done.append(1)
        let_in()
        done.append(2)


def pressed_within(done: Steps) -> None:
    with held_interrupts():
        with held_interrupts():
            press()
        done.append(1)


def pressed_in_turns(done: Steps, presses: int) -> None:
    with held_interrupts(), passed_on_at(presses):
        for _ in range(3):
            press()
            done.append(1)


def pressed_afterwards(done: Steps, presses: int) -> None:
    with held_interrupts():
        with passed_on_at(presses):
            pass
        for _ in range(3):
            press()
        done.append(1)


def pressed_beside_a_thread(done: Steps) -> None:
    def beside() -> None:
        with held_interrupts(), passed_on_at(1):
            let_in()
            done.append(1)

    with held_interrupts():
        press()
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        press()
        let_in()
        done.append(2)


def pressed_within_open_code(done: Steps) -> None:
    with held_interrupts(), passed_on_at(1):
        with held_interrupts():
            press()
            done.append(1)
        done.append(2)


def pressed_while_a_lock_is_held(done: Steps) -> None:
    lock = threading.Lock()
    lock.acquire()
    with held_interrupts():
        done.append(1)
        threading.Timer(0.1, press).start()
        with letting_in(lock):
            done.append(2)


RUNS = [
    pressed_and_let_in,
    pressed_within,
    pressed_beside_a_thread,
    pressed_within_open_code,
    pressed_while_a_lock_is_held,
]


@pytest.mark.parametrize("run", RUNS)
def test_it_waits_for_a_moment_that_suits_or_for_the_end(run) -> None:
    done: Steps = []
    with pytest.raises(KeyboardInterrupt):
        run(done)
    assert done == [1]
    with held_interrupts():
        let_in()


@pytest.mark.parametrize("presses", [1, 2])
def test_but_not_in_code_that_may_take_long(presses: int) -> None:
    done: Steps = []
    with pytest.raises(KeyboardInterrupt):
        pressed_in_turns(done, presses)
    assert len(done) == presses - 1
    with pytest.raises(KeyboardInterrupt):
        pressed_afterwards(done, presses)
    assert len(done) == presses


def test_what_the_program_does_with_it_stays() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with held_interrupts():
            press()
            press()
            assert heard == []
            let_in()
            let_in()
        assert heard == [signal.SIGINT] * 2
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with held_interrupts():
            press()
            let_in()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT] * 2


def test_a_handler_that_is_given_back_too_late_passes_on() -> None:
    with held_interrupts():
        found = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGINT, found)
    try:
        with pytest.raises(KeyboardInterrupt):
            press()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_comes_meanwhile_stays() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with held_interrupts():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_press_as_a_block_begins_leaves_the_next_one_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = signal.signal

    def pressing(*given: Any) -> Any:
        monkeypatch.setattr(signal, "signal", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(signal, "signal", pressing)
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        pass
    test_it_waits_for_a_moment_that_suits_or_for_the_end(pressed_and_let_in)


def test_a_press_as_a_block_ends_leaves_its_handler_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, before = signal.signal, signal.getsignal(signal.SIGINT)

    def pressing(number: int, handler: Any) -> Any:
        found = real(number, handler)
        if handler is before:
            press()
        return found

    monkeypatch.setattr(signal, "signal", pressing)
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_a_child_is_not_held_by_what_its_parent_holds() -> None:
    with held_interrupts():
        child = os.fork()
        if child == 0:  # of this thread: what is held is not its own
            try:
                press()
                time.sleep(5)
            except KeyboardInterrupt:
                os._exit(7)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
