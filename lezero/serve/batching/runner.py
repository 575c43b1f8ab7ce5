"""Runs a batched model in a thread: requests go in, whole answers come out.

The queue is guarded by one lock that is never held while the model runs, so a request is taken or
refused at once.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from lezero.core.errors import LeZeroError
from lezero.core.log import logger
from lezero.serve.batching.batcher import Ask, Batch, Batcher
from lezero.serve.batching.model import BatchedModel
from lezero.serve.threads import ComputeThread, Placement

_LOG = logger("serve")
_RECENT = 1024
_MOST_KINDS, _MOST_LETTERS = 20, 300
_SEARCHED = 0.02
"""Share of the time under load that may go into looking for a plan; idle time goes there anyway."""
_PAUSE_S = 1e-4
_CLOSING = "the server is shutting down"
_ENDED = "the server's loop of batches has failed, or its model for good"


class FailedError(LeZeroError):
    """The model failed on this request, or its answer is not a number. cause: for the log."""

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


class StoppedError(LeZeroError):
    """The request was given up, because the runner ends."""


Tell = Callable[[Sequence[Any] | Exception], None]
"""Takes the answers to a request's items, or what went wrong, in the runner's thread."""


class _Job:
    """A request: its items, and the answers so far."""

    def __init__(self, items: Sequence[Any], tell: Tell) -> None:
        self.items, self.tell = items, tell
        self.answers: list[Any] = [None] * len(items)
        self.left = len(items)
        self.ended = False


class Counts:
    """What a runner has done. Only its thread writes."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        """Requests by how they ended: answered, failed, cancelled."""
        self.items = self.steps = self.failed_steps = 0
        self.busy_s = 0.0
        self.latencies: deque[float] = deque(maxlen=_RECENT)
        self.sizes: deque[int] = deque(maxlen=_RECENT)
        """Items of the last steps."""


class Runner:
    """One model, one thread, one `Batcher`. tell_latency: hears each answered request's seconds.
    tell_plan: is called in the runner's thread when the batcher has another plan.
    """

    def __init__(
        self,
        model: BatchedModel,
        batcher: Batcher,
        tell_latency: Callable[[float], None] = lambda seconds: None,
        tell_plan: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.batcher, self.counts = model, batcher, Counts()
        self._tell_latency, self._tell_plan = tell_latency, tell_plan
        self._plans = batcher.plans
        self.active = 0
        """Requests that were submitted and have not ended."""
        self.broken: str | None = None
        """Why no request can be answered any more."""
        self._wake = threading.Condition()
        self._jobs: set[Ask] = set()
        self._stopping = self._closing = False
        self._spare_s = 0.0
        """Seconds that the search for a plan may take under load."""
        self._kinds: set[tuple[type, str, int]] = set()
        """Kinds of errors, by the place that raised them, whose traceback is in the log."""
        self._began: float | None = None
        self._thread = ComputeThread(self._run, "lezero-batches")

    def start(self, alone: bool = False) -> None:
        """alone: the process does nothing else."""
        self._thread.begin(alone)

    @property
    def placement(self) -> Placement | None:
        """Where the threads lie that compute."""
        return self._thread.placement

    def stop(self) -> None:
        """Gives up what waits and ends the thread, after the step that runs."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def submit(self, items: Sequence[Any], tell: Tell) -> Ask:
        """Lets a request of at least one item wait for its turn; `FullError` where it cannot,
        `FailedError` where no request can, and `StoppedError` once all were cancelled.

        All items are of one kind.
        """
        works = [self.model.work(item) for item in items]
        ask = Ask(works, self.model.kind(items[0]), _Job(items, tell))
        with self._wake:
            if self.broken is not None:
                raise FailedError(_ENDED)
            if self._closing:
                raise StoppedError(_CLOSING)
            self.batcher.add(ask, time.monotonic())
            self._jobs.add(ask)
            self.active += 1
            self._wake.notify()
        return ask

    def cancel(self, ask: Ask) -> None:
        """Ends a request; nothing happens to one that has ended."""
        with self._wake:
            if ask in self._jobs:
                self.batcher.cancel(ask)
                self._finish(ask, "cancelled", StoppedError("the request was cancelled"))

    def cancel_all(self) -> None:
        """Ends what there is, and what comes."""
        with self._wake:
            self._closing = True
            for ask in list(self._jobs):
                self.batcher.cancel(ask)
                self._finish(ask, "cancelled", StoppedError(_CLOSING))

    def stalled_s(self) -> float:
        """How long the step takes that runs now."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def _run(self) -> None:
        try:
            while (batch := self._next()) is not None:
                self._step(batch)
                del batch  # or the answers would stay until the next one
        except BaseException as error:  # not of the model: nobody may wait for ever
            _LOG.error("the loop of batches failed", exc_info=error)
            self._break(error)
        self.cancel_all()

    def _step(self, batch: Batch) -> None:
        failed = self.counts.failed_steps
        began = self._began = time.monotonic()
        answers = self._answers(batch)
        self._log_failed(batch, answers)
        with self._wake:
            for (ask, item), answer in zip(batch.items, answers, strict=True):
                self._take(ask, item, answer)
            took = time.monotonic() - began
            self._began = None
            # One that ran again item by item tells nothing of how long a step takes.
            whole = failed == self.counts.failed_steps
            sound = not any(isinstance(x, Exception) for x in answers)
            self.batcher.done(batch, took, learn=whole and sound)
            self.counts.steps += 1
            self.counts.busy_s += took
            self.counts.sizes.append(len(batch.items))
            if self.batcher.is_searching and self.batcher.waiting:
                self._search_under_load(took)
        self._note_plan()

    def _note_plan(self) -> None:
        if self._plans != self.batcher.plans:
            self._plans = self.batcher.plans
            self._tell_plan()

    def _break(self, error: BaseException) -> None:
        """Ends all requests, and those that come."""
        with self._wake:
            self.broken, self._began = f"{type(error).__name__}: {error}", None
            for ask in list(self._jobs):
                self.batcher.cancel(ask)
                self._finish(ask, "failed", FailedError(_ENDED))

    def _next(self) -> Batch | None:
        """The next step, as soon as there is one; None: it is over."""
        while True:
            with self._wake:
                if self._stopping:
                    return None
                now = time.monotonic()
                found = self.batcher.next(now)
                if isinstance(found, Batch):
                    return found
                seconds = None if found is None else max(0.0, found - now)
                if self.batcher.is_searching:
                    self.batcher.search()
                    seconds = _PAUSE_S  # in which requests come in
                if self._plans == self.batcher.plans:
                    self._wake.wait(seconds)
            self._note_plan()

    def _search_under_load(self, step_s: float) -> None:
        self._spare_s += _SEARCHED * step_s
        if self._spare_s > 0:
            began = time.monotonic()
            self.batcher.search()
            self._spare_s -= time.monotonic() - began

    def _answers(self, batch: Batch) -> list[Any]:
        """An answer or an error for each item; after an error each item runs by itself."""
        items = [_job(ask).items[item] for ask, item in batch.items]
        try:
            found = list(self.model.run(items))
            assert len(found) == len(items), "an answer for each item"
            return [self._checked(answer) for answer in found]
        except BaseException as error:  # whatever a module does, SystemExit too
            self.counts.failed_steps += 1
            alone = len(items) == 1
            found = [self._failed(error)] if alone else [self._alone(item) for item in items]
            failed = all(isinstance(x, FailedError) and x.cause for x in found)
            if failed and not self.model.on_cpu:
                self._break_if_dead()
            if not any(isinstance(x, FailedError) for x in found):
                said = self._said(error)
                _LOG.error("a step of %d items failed, but none alone: %s", len(items), said)
            return found

    def _break_if_dead(self) -> None:
        """Ends all requests where the model does not even run what it was measured with: on an
        accelerator an index out of range ends all work of the process. Memory comes back."""
        try:
            self.model.run(next(self.model.samples()))
        except (MemoryError, torch.OutOfMemoryError):
            return
        except BaseException as error:
            _LOG.error("the model runs nothing any more: %s", self._said(error))
            self._break(error)

    def _alone(self, item: Any) -> Any:
        try:
            return self._checked(self.model.run([item])[0])
        except BaseException as error:
            return self._failed(error)

    def _failed(self, error: BaseException) -> FailedError:
        # The error itself is not kept, since its frames hold the tensors of the step.
        return FailedError("the model failed on this request", self._said(error))

    def _said(self, error: BaseException) -> str:
        """An error in one line; the first one of each kind with its traceback."""
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        kind = (type(error), frame.f_code.co_filename, line)
        try:
            text = str(error)
        except BaseException:  # of the module, as the error is
            text = "an error that cannot be told in words"
        words = next(iter(text.strip().splitlines()), "")[:_MOST_LETTERS]
        said = f"{type(error).__name__}: {words}"
        if kind in self._kinds or len(self._kinds) == _MOST_KINDS:
            return said
        self._kinds.add(kind)
        return "\n".join([said, *traceback.format_exception(error)])

    def _log_failed(self, batch: Batch, answers: Sequence[Any]) -> None:
        """Writes a line for each request that the model failed on."""
        asks: set[Ask] = set()
        for (ask, item), answer in zip(batch.items, answers, strict=True):
            if isinstance(answer, FailedError) and answer.cause and ask not in asks:
                asks.add(ask)
                _LOG.error("the model failed on item %d of a request: %s", item, answer.cause)

    def _checked(self, answer: Any) -> Any:
        sound = self.model.is_sound(answer)
        return answer if sound else FailedError("the answer to this request is not a number")

    def _take(self, ask: Ask, item: int, answer: Any) -> None:
        """Keeps the answer to an item; the last one ends the request, and so does an error."""
        job = _job(ask)
        if job.ended:
            return
        if isinstance(answer, Exception):
            self.batcher.cancel(ask)
            self._finish(ask, "failed", answer)
            return
        self.counts.items += 1
        job.answers[item] = answer
        job.left -= 1
        if job.left == 0:
            latency = time.monotonic() - ask.arrived_s
            self.counts.latencies.append(latency)
            self._tell_latency(latency)
            self._finish(ask, "answered", job.answers)

    def _finish(self, ask: Ask, how: str, outcome: Sequence[Any] | Exception) -> None:
        job = _job(ask)
        job.ended = True
        self._jobs.discard(ask)
        self.active -= 1
        self.counts.ended[how] += 1
        with suppress(RuntimeError):  # the loop that listens has ended
            job.tell(outcome)


def _job(ask: Ask) -> _Job:
    assert isinstance(ask.payload, _Job)
    return ask.payload
