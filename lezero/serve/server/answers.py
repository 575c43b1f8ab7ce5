"""From a question to its answers: waiting for the engine's events, and passing them on.

Whatever happens here, the requests are cancelled at the end, which frees their blocks; that does
nothing to those that have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from lezero.serve.request import Request
from lezero.serve.server.asked import Asked
from lezero.serve.server.backlog import Backlog
from lezero.serve.server.coded import Encoder, TokenText
from lezero.serve.server.exchange import JSON, PIECE, Exchange, as_json, as_json_in_parts
from lezero.serve.server.lanes import Lanes
from lezero.serve.server.problem import ClientGoneError, Problem, refused
from lezero.serve.server.told import Teller
from lezero.serve.server.worker import BusyError, Event, Events, Worker


class Answerer:
    """Answers questions over one worker. seconds: that one may take. model: its public name."""

    def __init__(
        self,
        worker: Worker,
        encoder: Encoder,
        lanes: Lanes,
        text: TokenText,
        model: str,
        seconds: float,
    ) -> None:
        self._worker, self._encoder, self._lanes, self._text = worker, encoder, lanes, text
        self._model, self._seconds = model, seconds

    async def answer(self, exchange: Exchange, asked: Asked) -> None:
        """Answers, or raises `Problem` before the answer began, or `ClientGoneError`."""
        told = await self._told(exchange, asked)
        if told is not None:  # to read it takes the client's time
            await exchange.reply(200, told, JSON)

    async def _told(self, exchange: Exchange, asked: Asked) -> bytes | None:
        """A whole answer, which is still to be sent; None where it was streamed, or failed."""
        if asked.count > self._worker.room:
            field = "n" if asked.n > 1 else "prompt"
            problem = (
                f"{field}: {asked.count} answers, this server takes {self._worker.room} at once"
            )
            raise Problem(400, problem, param=field)
        try:
            self._worker.reserve(asked.count)
        except BusyError:
            raise busy(self._worker, asked.count) from None
        requests: list[Request] = []
        with Backlog(exchange.held) as events:
            try:
                async with asyncio.timeout(self._seconds):
                    requests = await self._begin(exchange, asked, events)
                    return await self._tell(exchange, asked, requests, events)
            except TimeoutError:
                await _fail(exchange, Problem(504, f"not ended within {self._seconds:g} s"))
                return None
            finally:
                self._worker.cancel(requests)

    async def _begin(self, exchange: Exchange, asked: Asked, events: Events) -> list[Request]:
        """Encodes the prompts and submits their requests, or gives their places back."""
        try:
            encoding = self._encoder.requests(asked, exchange.owner)
            requests = await exchange.unless_gone(encoding)
            self._worker.submit(requests, events, exchange.asked_s)
        except BaseException:
            self._worker.release(asked.count)
            raise
        return requests

    async def _tell(
        self, exchange: Exchange, asked: Asked, requests: list[Request], events: Backlog
    ) -> bytes | None:
        """A whole answer, which is still to be sent; None where it was streamed."""
        teller = Teller(asked, self._model, requests, self._text)
        leaving = asyncio.create_task(_tell_when_gone(exchange, events))
        try:
            if asked.stream:
                await self._stream(exchange, asked, teller, events)
                return None
            async for event in _until_ended(events, len(requests)):
                teller.choices[event.index].take(event)
            length = sum(len(choice.tokens) + len(choice.text) for choice in teller.choices)
            length *= 1 + (asked.params.logprobs or 0)
            return await self._lanes.write(length, lambda: as_json_in_parts(teller.whole()))
        finally:
            leaving.cancel()

    async def _stream(
        self, exchange: Exchange, asked: Asked, teller: Teller, events: Backlog
    ) -> None:
        """Sends chunks as they come; those that wait together go together, up to a piece, behind
        each of which the client is waited for."""
        chunks: list[bytes] = []
        length = 0
        try:
            async for event in _until_ended(events, len(teller.choices)):
                found = teller.piece(event)
                if found is not None:
                    chunks.append(as_json(found))
                    length += len(chunks[-1])
                if chunks and (events.empty() or length >= PIECE):
                    if exchange.status is None:
                        await exchange.begin_events()
                    await exchange.send_events(chunks)
                    chunks, length = [], 0
                    if not events.empty():  # the next one comes at once, and others get no turn
                        await asyncio.sleep(0)
        except Problem as problem:
            if exchange.status is None:
                raise
            events.close()  # others need the room while the client is told
            await _fail(exchange, problem, chunks)
            return
        if exchange.status is None:
            await exchange.begin_events()
        if asked.stream_usage:
            chunks.append(as_json(teller.last_piece()))
        await exchange.send_events([*chunks, b"[DONE]"])
        await exchange.end_events()


def busy(worker: Worker, count: int) -> Problem:
    """What a client is told whose question asks for more answers than there is room for now."""
    taken = f"the server has {worker.active} of the {worker.room} requests it takes"
    asks = "" if count == 1 else f", and this asks for {count}"
    problem = f"{taken}{asks}; try again later"
    return Problem(429, problem, code="queue_full", retry_s=worker.wait_s())


async def _until_ended(events: Backlog, count: int) -> AsyncIterator[Event]:
    """Events until `count` requests have ended; raises for those that fail, and for a client
    that has left."""
    while count:
        event = await events.get()
        if event is None:
            raise ClientGoneError
        if event.refused is not None:
            raise refused(event.refused)
        if event.reason == "error":
            raise Problem(500, event.error or "the engine failed", code="engine_error")
        if event.reason == "cancelled":
            raise Problem(503, "the server is shutting down", retry_s=5)
        count -= event.reason is not None
        if count:
            events.refuse_beyond()
        yield event


async def _tell_when_gone(exchange: Exchange, events: Events) -> None:
    await exchange.gone()
    events.put_nowait(None)


async def _fail(exchange: Exchange, problem: Problem, chunks: list[bytes] | None = None) -> None:
    """Tells of a problem, as an event where the answer has begun."""
    if exchange.status is None:
        await exchange.fail(problem)
        return
    with suppress(TimeoutError):  # the client may not read what is sent
        async with asyncio.timeout(1):
            await exchange.send_events([*(chunks or []), as_json(problem.body())])
            await exchange.end_events()
