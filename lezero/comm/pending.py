"""Collectives in flight: who may take which step when.

A collective is a generator that yields what it waits for and does its own work in between: it has
sent its chunks and waits for the others'; it has summed and waits for the result. `Queue` runs
them.

[Note: one order of steps on every rank]
Step s of a collective may use a channel (a group, a counter) of its own, "lane" s, on which calls
must come in the same order on every rank. The first step is taken when the collective is launched,
in the program's order. A later one is taken when its data has come, which differs from rank to
rank; so a collective takes step s only after every earlier one has taken step s or has no such
step. All progress is made in `launch`, `poll` and `wait`, and while this process blocks in a
collective of `core.groups`: there is no thread.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from lezero.core import groups, in_flight, observer
from lezero.core.errors import ConfigError, DistributedError, OrderError


class Wait(Protocol):
    """What a collective waits for."""

    def done(self) -> bool: ...

    def block(self, deadline: float) -> None:
        """Returns when done. `DistributedError` at `deadline` (monotonic) or without a peer."""


IN_FLIGHT = 1024
Steps = Generator[Wait, None, None]


class Arrived:
    """A collective of torch in flight."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def done(self) -> bool:
        return bool(self.work.is_completed())

    def block(self, deadline: float) -> None:
        with groups.naming_lost_ranks():
            in_flight.block(self.work)


class Call(NamedTuple):
    """What a collective is, for messages and for who watches."""

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str

    def __str__(self) -> str:
        return f"{self.operation} '{self.key}'"


class Pending:
    """A collective that was launched. Its results are valid after `wait()`."""

    def __init__(self, queue: Queue, steps: Steps, call: Call) -> None:
        self.call = call
        self._queue, self._steps = queue, steps
        self._waits_for: Wait | None = None
        self.taken = 0
        self.finished = False

    def wait(self) -> None:
        """Returns when the results are there and the arguments may be changed.

        Raises `DistributedError` when another rank is gone, hangs or calls something else, and
        `OrderError` when the link was closed before.
        """
        self._queue.finish(self)

    def poll(self) -> bool:
        """Makes progress without waiting; True when the results are there. Raises as `wait`."""
        self._queue.progress()
        self._queue.need(self)
        return self.finished

    def step(self) -> None:
        """Takes the next step. Only the queue calls this."""
        if self._waits_for is not None:
            self._waits_for.block(0.0)  # it has ended, be it with an error, which is raised here
        self.taken += 1
        try:
            self._waits_for = next(self._steps)
        except StopIteration:
            self._waits_for, self.finished = None, True
            watcher = observer.current()
            if watcher is not None:
                watcher.leave()

    def ready(self) -> bool:
        return self._waits_for is None or self._waits_for.done()

    def block(self, deadline: float) -> None:
        if self._waits_for is not None:
            self._waits_for.block(deadline)


class Queued(Pending):
    """A collective whose steps are all on a stream. `wait` lets the current stream wait for it.

    [Note: what the stream still uses]
    The steps end when they are all in the stream's queue, and their references with them. Freed
    memory goes to the next tensor of the stream that it came from, which does not wait for this
    one. So the arguments live until the event, or until that stream waits for it.
    """

    event: torch.Event

    def __init__(
        self, queue: Queue, steps: Steps, call: Call, origin: torch.Stream, keeps: tuple[Any, ...]
    ) -> None:
        super().__init__(queue, steps, call)
        self._origin, self._keeps = origin, keeps

    def wait(self) -> None:
        current = torch.accelerator.current_stream(self.event.device)
        current.wait_event(self.event)
        if current == self._origin:
            self._keeps = ()

    def poll(self) -> bool:
        self.finished = bool(self.event.query())
        if self.finished:
            self._keeps = ()
        return self.finished


class Queue:
    """The collectives of one link, in launch order."""

    def __init__(self, timeout_s: float, device: torch.device) -> None:
        self.timeout_s = timeout_s
        self.waited_s = 0.0
        """How long this process has stood still for other ranks."""
        self._running: deque[Pending] = deque()
        self._broken: BaseException | None = None
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)

    def launch(self, steps: Steps, call: Call, *tensors: torch.Tensor) -> Pending:
        """Takes the first step of `steps` now, and of those before what they can take.

        `tensors` are what it reads and writes. With `IN_FLIGHT` collectives under way it first
        waits for the oldest.
        """
        watcher = observer.current()
        if watcher is not None:
            watcher.enter(*call)
        if self._stream is not None:
            return self._enqueue(self._stream, steps, call, tensors)
        pending = Pending(self, steps, call)
        self.progress()
        if len(self._running) >= IN_FLIGHT:
            self.finish(self._running[0])
        with self._guarded(pending):
            pending.step()
        if not pending.finished:
            self._running.append(pending)
            in_flight.launched(self)
            self.progress()
        return pending

    def _enqueue(
        self, stream: torch.Stream, steps: Steps, call: Call, tensors: tuple[torch.Tensor, ...]
    ) -> Pending:
        """On an accelerator: all steps at once, on a stream beside that of the computation.

        There a wait holds back the stream and not this process, so nothing is left for later.
        """
        origin = torch.accelerator.current_stream(stream.device)
        stream.wait_stream(origin)
        pending = Queued(self, steps, call, origin, tensors)
        with self._guarded(pending), stream:
            for wait in steps:
                wait.block(time.monotonic() + self.timeout_s)
            pending.event = stream.record_event()
        watcher = observer.current()
        if watcher is not None:
            watcher.leave()
        while self._running and self._running[0].poll():
            self._running.popleft()
        self._running.append(pending)
        return pending

    def progress(self) -> None:
        """Takes every step that can be taken without waiting."""
        if self._stream is not None:
            return
        again = True
        while again:
            again, slowest = False, sys.maxsize
            for pending in self._running:
                while pending.taken < slowest and not pending.finished and pending.ready():
                    with self._guarded(pending):
                        pending.step()
                    again = True
                if not pending.finished:
                    slowest = min(slowest, pending.taken)
                if slowest == 1:
                    break
            while self._running and self._running[0].finished:
                self._running.popleft()

    def moves(self) -> bool:
        """Makes progress; whether some are in flight that this process must go on moving.

        None of a broken link are, which has told its error where that belongs.
        """
        if self._stream is not None or self._broken is not None:
            return False
        self.progress()
        return bool(self._running)

    def finish(self, pending: Pending) -> None:
        """Waits for `pending`, and for those before it as far as it needs them."""
        deadline = time.monotonic() + self.timeout_s
        self.progress()
        while not pending.finished:
            self.need(pending)
            head = self._running[0]
            began = time.perf_counter()
            with self._guarded(head):
                head.block(deadline)
            self.waited_s += time.perf_counter() - began
            self.progress()

    def need(self, pending: Pending) -> None:
        """Raises `OrderError` for what `abandon` has forgotten."""
        if not pending.finished and not self._running:
            raise OrderError(
                f"{pending.call}: its link was closed before it was done; wait for it first"
            )

    def drain(self) -> None:
        """Waits for everything in flight."""
        for pending in list(self._running):
            pending.wait()

    def abandon(self) -> None:
        """Forgets everything in flight; the buffers that it used must not be used again."""
        self._running.clear()

    @contextlib.contextmanager
    def _guarded(self, pending: Pending) -> Iterator[None]:
        """A collective that failed leaves the ranks out of step: the link takes no more."""
        if self._broken is not None:
            why = str(self._broken) or type(self._broken).__name__
            raise DistributedError(f"this wire failed before: {why}")
        try:
            with torch.no_grad():
                yield
        except ConfigError:
            raise  # a wrong argument, found before the first step, on every rank
        except DistributedError as error:
            self._broken = DistributedError(f"{pending.call}: {error}")
            raise self._broken from error
        except BaseException as error:  # an interrupt too: it cuts a step in two
            self._broken = error
            raise
