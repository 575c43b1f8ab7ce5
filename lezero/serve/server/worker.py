"""The engine in a thread of its own: requests go in, pieces of text come out.

[Note: one thread] Only the worker's thread touches the engine. Others leave orders in its inbox,
which it empties between two steps, so a cancelled request gives its blocks back after the step that
runs, at most. What a step brings goes to the event loop in one call, however many requests it is
for.

[Note: tokens that go together] A model's weights push all else out of the processor's caches, so
waking the event loop for one token takes up to a twentieth of a token's time. First tokens and ends
go at once; others within `_TOGETHER_S`, unless the next step takes in a prompt, which may be long.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from lezero.core.errors import ConfigError, NumericsError
from lezero.core.log import logger
from lezero.serve.answer import Answer, Named
from lezero.serve.llm import LLM
from lezero.serve.rehearsal import Paces
from lezero.serve.request import Reason, Request
from lezero.serve.server.embedder import Embedder, Embedding, EngineError, Outcome
from lezero.serve.server.metrics import Metrics
from lezero.serve.threads import ComputeThread, Placement

_LOG = logger("serve")
_ENDS = "the engine has ended"
_TOGETHER_S = 0.02
_FILLED = 64
"""Tokens of a step, all requests together, from which on products limit it."""


class BusyError(Exception):
    """There is no room for more requests now."""


@dataclass(frozen=True, slots=True)
class Event:
    """News of a request: text and tokens since the last one; the last one has a reason.

    index: which of the requests that were submitted together. named: tokens whose text is certain,
    where log-probabilities are asked for. refused: it never began.
    """

    index: int
    text: str = ""
    tokens: Sequence[int] = ()
    named: Sequence[Named] = ()
    reason: Reason | None = None
    error: str | None = None
    refused: ConfigError | None = None


Events = asyncio.Queue[Event | None]


class _Job:
    """A request, the text it has so far, and where its events go. asked_s: when it came."""

    def __init__(
        self, request: Request, answer: Answer, index: int, events: Events, asked_s: float
    ) -> None:
        self.request, self.answer = request, answer
        self.index, self.events, self.asked_s = index, events, asked_s
        self.last_s: float | None = None
        self.shown = 0


class Worker:
    """Runs the engine of `llm`; made, started and stopped in the thread of an event loop.

    room: requests that may run or wait, all together.
    """

    def __init__(self, llm: LLM, metrics: Metrics, room: int) -> None:
        self._llm, self.engine, self.metrics, self.room = llm, llm.engine, metrics, room
        self.broken: str | None = None
        """Why no request can be answered any more."""
        self.active = 0
        """Requests that have a place, those too whose prompts are still encoded."""
        self.paces = Paces()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._jobs: dict[Request, _Job] = {}
        self._out: list[tuple[Events, Event]] = []
        self._urgent, self._sent_s = False, 0.0
        self._embedder = Embedder(llm.engine, metrics)
        self._stopping = self._closing = False
        self._took_s = 1.0
        self._step_began: float | None = None
        self._thread = ComputeThread(self._run, "lezero-engine")

    def start(self, alone: bool = False) -> None:
        """alone: the process does nothing else."""
        self._loop = asyncio.get_running_loop()
        self._thread.begin(alone and self.engine.program.place.type == "cpu")

    @property
    def placement(self) -> Placement | None:
        """Where the threads lie that compute."""
        return self._thread.placement

    async def stop(self) -> None:
        """Cancels what runs and ends the thread, after the step that runs."""
        self._order(self._stop)
        while self._thread.is_alive():
            await asyncio.sleep(0.005)

    def reserve(self, count: int) -> None:
        """Takes places for requests to come; raises `BusyError` where there is no room for all."""
        with self._wake:
            if self.active + count > self.room:
                raise BusyError
            self.active += count

    def release(self, count: int) -> None:
        """Gives places back that no request was submitted to."""
        with self._wake:
            self.active -= count

    def submit(self, requests: Sequence[Request], events: Events, asked_s: float) -> None:
        """Lets requests wait for their turn, in places of theirs, which they give back. asked_s:
        when the question had come (`time.monotonic`), before its tokens were found."""
        coder = self._llm.coder
        jobs = [
            _Job(x, Answer(x, coder, places=x.params.logprobs is not None), index, events, asked_s)
            for index, x in enumerate(requests)
        ]
        self._order(lambda: self._add(jobs))

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Embeddings, made between steps, in a place that stays the caller's.

        Raises `NumericsError`, `ConfigError` where this model makes none, and `EngineError` for
        what is not the prompts' fault.
        """
        future: asyncio.Future[list[Tensor]] = self._loop.create_future()

        def told(outcome: Outcome) -> None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(_settle, future, outcome)

        asked = Embedding(prompts, told)
        self._order(lambda: self._begin_embedding(asked))
        try:
            return await future
        finally:
            self._order(lambda: self._embedder.drop(asked))

    def cancel(self, requests: Iterable[Request]) -> None:
        """Ends requests; nothing happens to those that have ended."""
        given = list(requests)
        self._order(lambda: self._cancel(given))

    def cancel_all(self) -> None:
        """Ends what there is, and what comes."""
        self._order(self._close)
        self._order(lambda: self._embedder.end(EngineError(_ENDS, ended=True)))

    @property
    def running(self) -> int:
        """Requests and embeddings that run."""
        return len(self.engine.scheduler.running) + self._embedder.running

    def wait_s(self) -> int:
        """Seconds after which a place may be free: as long as the last requests took, shared."""
        return max(1, min(60, round(self._took_s / max(1, self.engine.scheduler.max_requests))))

    def stalled_s(self) -> float:
        """How long the step takes that runs now."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def _order(self, order: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(order)
            self._wake.notify()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._work()
            except BaseException as error:  # not of a step: nobody may wait for ever
                _LOG.error("the engine's loop failed", exc_info=error)
                self._break(error)
                self._send()

    def _work(self) -> None:
        while self._take_orders():
            if self.engine.busy:
                self._step()
                if self._is_time():
                    self._send()
            if self._embedder.busy:
                self._embed()

    def _take_orders(self) -> bool:
        """Does what was ordered; waits where there is nothing to do. False: it is over."""
        with self._wake:
            while not (self._inbox or self._busy or self._stopping):
                self._wake.wait()
        if self._inbox:
            while self._inbox:
                self._inbox.popleft()()
            self._send()
        return not self._stopping

    @property
    def _busy(self) -> bool:
        return self.engine.busy or self._embedder.busy

    def _begin_embedding(self, asked: Embedding) -> None:
        if self.broken is not None or self._closing:
            asked.told(EngineError(_ENDS, ended=self._closing))
        else:
            self._embedder.add(asked)

    def _embed(self) -> None:
        self._step_began = time.monotonic()
        try:
            error = self._embedder.step()
        finally:
            self._step_began = None
        if error is not None and not isinstance(error, NumericsError | ConfigError):
            _LOG.error("an embedding failed", exc_info=error)
            self.metrics.failed_steps += 1
            self._end_if_broken(error)

    def _add(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            if self.broken is not None:
                self._end(job, Event(job.index, reason="error", error=_ENDS))
                continue
            if self._closing:
                self._end(job, Event(job.index, reason="cancelled"))
                continue
            try:
                self.engine.add(job.request)
            except ConfigError as error:
                self._end(job, Event(job.index, reason="error", refused=error))
            else:
                self._jobs[job.request] = job

    def _cancel(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request in self._jobs:
                self.engine.cancel(request)
                self._report(request, ())

    def _close(self) -> None:
        self._closing = True
        self._cancel(list(self._jobs))

    def _stop(self) -> None:
        self._stopping = True
        self._close()
        self._embedder.end(EngineError(_ENDS, ended=True))

    def _step(self) -> None:
        totals = self.engine.totals
        fed, drawn, drafted = totals.fed, totals.drawn, totals.drafted
        began = self._step_began = time.monotonic()
        try:
            progress = self.engine.step()
        except Exception as error:
            self._step_failed(error)
            return
        finally:
            self._step_began = None
        took, fed, drafted = time.monotonic() - began, totals.fed - fed, totals.drafted - drafted
        if len(progress.tokens) == 1 and fed == progress.passes + drafted:
            (request,) = progress.tokens
            if drafted or request.plain:  # else a step is a call of its own, which was not tried
                plain = self.paces.alone if request.greedy else self.paces.drawn
                (self.paces.guessing if drafted else plain).add(totals.drawn - drawn, took)
        elif fed >= _FILLED and not drafted:
            self.paces.filling.add(fed, took)
        for request in dict.fromkeys([*progress.tokens, *progress.ended]):
            self._report(request, progress.tokens.get(request, ()))
        if progress.failures:
            self.metrics.failed_steps += 1
            self._end_if_broken(next(iter(progress.failures.values())))

    def _step_failed(self, error: Exception) -> None:
        """Ends the requests of a step whose fault is not one request's, but the engine's."""
        _LOG.error("a step of the engine failed", exc_info=error)
        self.metrics.failed_steps += 1
        self._give_up(self.engine.scheduler.running)
        self._end_if_broken(error)

    def _end_if_broken(self, error: Exception) -> None:
        """Ends all requests where the model does not even take one token any more."""
        if not self.engine.works():
            self._break(error)

    def _break(self, error: BaseException) -> None:
        """Ends all requests, and those that come."""
        self.broken = f"{type(error).__name__}: {error}"
        scheduler = self.engine.scheduler
        self._give_up([*scheduler.running, *scheduler.waiting])
        self._embedder.end(EngineError(_ENDS))

    def _give_up(self, requests: Sequence[Request]) -> None:
        for request in list(requests):
            reason = "the engine failed while it ran this request"
            self.engine.scheduler.finish(request, "error", reason)
            self._report(request, ())

    def _report(self, request: Request, tokens: Sequence[int]) -> None:
        """Takes the new tokens of a request and tells its client."""
        job = self._jobs.get(request)
        if job is None:
            return
        try:
            tokens = job.answer.take(tokens, self.engine.scheduler)
            self._count(job, len(tokens))
            if request.reason is not None:
                job.answer.completion()
            text = job.answer.text[job.shown :]
        except BaseException as error:  # a panic of tokenizers is no Exception
            _LOG.error("the text of a request failed", exc_info=error)
            why = "its tokens do not become text"
            self.engine.scheduler.finish(request, "error", why, sound=True)
            self._end(job, Event(job.index, reason="error", error=request.error or str(error)))
            return
        job.shown += len(text)
        named = job.answer.named()
        event = Event(job.index, text, tokens, named, request.reason, request.error)
        if request.reason is None:
            self._out.append((job.events, event))
        else:
            self._end(job, event)

    def _count(self, job: _Job, count: int) -> None:
        if count == 0:
            return
        now, metrics, request = time.monotonic(), self.metrics, job.request
        metrics.tokens_out += count
        if job.last_s is None:
            self._urgent = True
            metrics.first_token_s.add(now - job.asked_s)
            metrics.tokens_asked += len(request.prompt)
            metrics.tokens_cached += request.cached
        else:
            metrics.between_tokens_s.add((now - job.last_s) / count, count)
        job.last_s = now

    def _end(self, job: _Job, event: Event) -> None:
        self._jobs.pop(job.request, None)
        self._urgent = True
        if job.last_s is not None:
            self._took_s += 0.1 * (job.last_s - job.asked_s - self._took_s)
        self.metrics.ended["refused" if event.refused else str(event.reason)] += 1
        self.release(1)
        self._out.append((job.events, event))

    def _is_time(self) -> bool:
        """Whether to send now what there is; see [Note: tokens that go together]."""
        if self._urgent or time.monotonic() - self._sent_s >= _TOGETHER_S:
            return True
        scheduler = self.engine.scheduler
        return bool(scheduler.waiting) or any(r.pending > 1 for r in scheduler.running)

    def _send(self) -> None:
        self._urgent, self._sent_s = False, time.monotonic()
        if self._out:
            out, self._out = self._out, []
            with suppress(RuntimeError):  # the loop has ended, and with it all who listen
                self._loop.call_soon_threadsafe(_put, out)


def _settle(future: asyncio.Future[list[Tensor]], outcome: Outcome) -> None:
    if future.done():
        return
    if isinstance(outcome, list):
        future.set_result(outcome)
    elif isinstance(outcome, NumericsError | ConfigError | EngineError):
        future.set_exception(outcome)
    else:
        future.set_exception(EngineError("the engine failed while it embedded this"))


def _put(out: Iterable[tuple[Events, Event]]) -> None:
    for events, event in out:
        events.put_nowait(event)
