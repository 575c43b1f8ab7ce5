"""Streams whose clients read more slowly than the model writes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from typing import Any, cast

import pytest

from lezero.serve.request import Request
from lezero.serve.server.answers import Answerer
from lezero.serve.server.asked import read_asked
from lezero.serve.server.backlog import Backlog
from lezero.serve.server.exchange import PIECE, Exchange
from lezero.serve.server.held import Held
from lezero.serve.server.told import Teller
from lezero.serve.server.worker import Event, Events, Worker
from tests.serve.server.running import Client, head, serving, small_llm, until
from tests.serve.server.test_held import read_a_little
from tests.serve.server.test_slow_readers import BODY, read_slowly

LETTERS = 1 << 12
MIB = 1 << 20
QUESTION = {"prompt": "abc", "max_tokens": 2, "stream": True}


def events_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers each stream with 16 MiB that come before its client has read any."""
    real = Worker.submit

    def submit(self: Worker, requests: Sequence[Request], events: Events) -> None:
        if requests[0].params.max_tokens != 2:
            return real(self, requests, events)
        self.release(1)
        for first in range(0, len(BODY), LETTERS):
            events.put_nowait(Event(0, BODY[first : first + LETTERS].decode(), [1]))
        return events.put_nowait(Event(0, reason="length"))

    monkeypatch.setattr(Worker, "submit", submit)


def streaming(client: Client) -> socket.socket:
    made, body = socket.socket(), json.dumps(QUESTION).encode()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
    made.settimeout(20)
    made.connect(("127.0.0.1", client.port))
    made.sendall(head("/v1/completions", len(body), "connection: close") + body)
    return made


def test_a_steady_reader_of_a_stream_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    events_at_once(monkeypatch)
    with serving(small_llm(), write_s=0.5) as client, streaming(client) as made:
        told = read_slowly(made, 1.5)
        assert told.count(BODY[:LETTERS]) == len(BODY) // LETTERS
        assert b"data: [DONE]" in told[-100:]
        until(lambda: client.server.app.held.bytes == 0)


def test_what_a_stream_has_yet_to_send_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    events_at_once(monkeypatch)
    with serving(small_llm(), answers_bytes=MIB) as client:
        held, asks = client.server.app.held, {"prompt": "abc", "max_tokens": 1}
        with streaming(client) as made:
            made.recv(1, socket.MSG_PEEK)
            assert held.bytes > 4 * MIB
            for patience_s in (30.0, 0.05):
                held._patience_s = patience_s
                read_a_little(made, 0.1)
                assert held.bytes > MIB
                refused = client.ask("/v1/completions", asks)
                assert (refused.status, refused.error["code"]) == (503, "overloaded")
            until(lambda: held.bytes == 0)
        assert client.ask("/v1/completions", asks).status == 200


def test_others_have_their_turns_between_the_pieces_of_a_backlog() -> None:
    sizes, waited = list[int](), set[int]()

    async def send(message: Any) -> None:
        sizes.append(len(message.get("body", b"")))

    async def run() -> None:
        scope = {"method": "POST", "path": "/", "headers": []}
        exchange = Exchange(scope, cast(Any, None), send, Held(MIB, 1.0))
        asked = read_asked("text", QUESTION, "m")
        teller = Teller(asked, "m", [cast(Any, None)], cast(Any, None))
        with Backlog(exchange.held) as events:
            for _ in range(1000):
                events.put_nowait(Event(0, "x" * 1000, [1]))
            events.put_nowait(Event(0, reason="length"))

            async def other() -> None:
                while True:
                    waited.add(events.qsize())
                    await asyncio.sleep(0)

            beside = asyncio.create_task(other())
            await Answerer._stream(cast(Any, None), exchange, asked, teller, events)
            beside.cancel()
        assert exchange.held.bytes == 0
        assert not exchange.held._sending

    asyncio.run(run())
    assert max(sizes) < PIECE + 2000
    assert len(waited) > sum(sizes) / PIECE - 1


def test_a_stream_that_waits_for_the_model_does_not_give_way() -> None:
    async def run() -> None:
        held = Held(1, 0.0)
        with Backlog(held) as events:
            for _ in range(2):
                events.put_nowait(Event(0, "a"))
                assert held._sending
                await events.get()
                assert (held.bytes, len(held._sending)) == (0, 0)
            events.put_nowait(Event(0, "a"))
        events.put_nowait(Event(0, "b"))
        assert (held.bytes, len(held._sending)) == (0, 0)

    asyncio.run(run())
