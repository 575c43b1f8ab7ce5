"""Ctrl-C waits where it would leave something half done."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from lezero.core import interrupts
from lezero.core.interrupts import held_interrupts, let_in, passed_on_at

Steps = list[object]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
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


@pytest.mark.parametrize("run", [pressed_and_let_in, pressed_within, pressed_beside_a_thread])
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
            assert heard == []
            let_in()
            let_in()
        assert heard == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with held_interrupts():
            press()
            let_in()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]
