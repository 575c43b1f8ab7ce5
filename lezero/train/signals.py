"""SIGTERM, Ctrl-C and a closed terminal (SIGHUP) end a run in order: the current step finishes and
a last generation is saved.

Under `nohup`, which has SIGHUP ignored, a run goes on when its terminal closes. A second Ctrl-C
gives up at once. Handlers are put back when the block ends; outside the main thread nothing is
installed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from lezero.core.log import logger


class StopRequest:
    """Which signal arrived, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def exit_status(self) -> int:
        """0, or 128 + the signal's number, as shells count."""
        return 0 if self.signal is None else 128 + int(self.signal)


@contextmanager
def graceful_stop(ask: Callable[[], None]) -> Iterator[StopRequest]:
    """Calls `ask` on the first SIGTERM, SIGINT or SIGHUP within the block."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if request.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if request.signal is None:
            name = signal.Signals(number).name
            logger("train").info("%s: the run ends and saves after this step", name)
        request.signal = signal.Signals(number)
        ask()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    old = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
