"""Streams whose clients read more slowly than the model writes."""

from __future__ import annotations

import asyncio
import json
import socket
import tracemalloc
from collections.abc import Sequence
from typing import Any, cast

import pytest

from lezero.serve.answer import Named
from lezero.serve.request import Request
from lezero.serve.sampling import TokenLogprob
from lezero.serve.server.answers import Answerer, _until_ended
from lezero.serve.server.asked import read_asked
from lezero.serve.server.backlog import Backlog
from lezero.serve.server.coded import TokenText
from lezero.serve.server.exchange import PIECE, Exchange, as_json, as_json_in_parts
from lezero.serve.server.held import Held
from lezero.serve.server.problem import Problem
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

    def submit(self: Worker, requests: Sequence[Request], events: Events, asked_s: float) -> None:
        if requests[0].params.max_tokens != 2:
            return real(self, requests, events, asked_s)
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


NAMED = Named(65, TokenLogprob(-0.1, tuple((66 + i, -3.0 - i / 7) for i in range(20))), 0)
MANY = {"messages": [{"role": "user", "content": "abc"}], "logprobs": True, "top_logprobs": 20}


def test_log_probabilities_count_until_the_answer_ends() -> None:
    async def run() -> None:
        held = Held(10_000, 1.0)
        with Backlog(held) as events:
            events.put_nowait(Event(0, "a", [1], [NAMED]))
            await events.get()
            events.refuse_beyond()
            kept = held.bytes
            assert kept > 2000
            held.bytes += 10_000
            with pytest.raises(Problem, match="try again later") as found:
                events.refuse_beyond()
            assert found.value.status == 503
            held.bytes -= 10_000
            events.put_nowait(Event(0, "a", [1] * 4, [NAMED] * 4))
            await events.get()
            assert held.bytes == 5 * kept
            with pytest.raises(Problem, match="n times max_tokens") as found:
                events.refuse_beyond()
            assert found.value.status == 400
        assert held.bytes == 0

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_too_many_log_probabilities_ends(stream: bool) -> None:
    body = {**MANY, "n": 4, "max_tokens": 30, "ignore_eos": True, "stream": stream}
    with serving(small_llm(), answers_bytes=1 << 18) as client:
        found = client.ask("/v1/chat/completions", body)
        # A stream that is too much before its first piece went out has a status of its own.
        assert found.status in ((200, 400) if stream else (400,))
        told = found.body.rpartition(b"data: ")[2]
        assert json.loads(told)["error"]["param"] == "logprobs"
        until(lambda: client.server.app.held.bytes == 0)
        until(lambda: client.server.worker.active == 0)
        few = client.ask("/v1/chat/completions", {**body, "n": 1, "stream": False})
        assert len(few.json["choices"][0]["logprobs"]["content"]) == 30


@pytest.mark.parametrize("form", ["chat", "text"])
def test_log_probabilities_are_written_one_by_one(form: Any) -> None:
    asked = read_asked(form, MANY if form == "chat" else {"prompt": "a", "logprobs": 20}, "m")
    llm = small_llm()
    requests = [llm.request("abc", asked.params, i) for i in range(2)]
    teller = Teller(asked, "m", requests, TokenText(llm.coder))
    for index in range(2):
        teller.choices[index].take(Event(index, "a", [65] * 100, [NAMED] * 100, "length"))
    as_json_in_parts(teller.whole())  # names of tokens are kept
    tracemalloc.start()
    found = as_json_in_parts(teller.whole())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * len(found)
    parts = [teller.piece(Event(i, "a", [65] * 100, [NAMED] * 100, "length")) for i in range(2)]
    told = json.loads(found)["choices"]
    for choice, part in zip(told, parts, strict=True):
        assert part is not None
        assert choice["logprobs"] == json.loads(as_json(part))["choices"][0]["logprobs"]


def test_answers_go_on_where_a_slow_reader_gives_way() -> None:
    """The reader was cut off, and every other answer with log-probabilities ended beside it."""

    async def run() -> None:
        held, begun = Held(10_000, 0.0), asyncio.Event()

        async def slow() -> None:
            with Backlog(held) as events:
                events.put_nowait(Event(0, "a" * 20_000))
                begun.set()
                await asyncio.sleep(60)

        reader = asyncio.create_task(slow())
        await begun.wait()
        await asyncio.sleep(0.01)
        with Backlog(held) as one, Backlog(held) as other:
            for events in (one, other):
                events.put_nowait(Event(0, "a", [1], [NAMED]))
                await asyncio.wait_for(events.get(), 1)
            assert held.bytes > 20_000
            one.refuse_beyond()  # cuts the reader off
            other.refuse_beyond()  # who is going
            await asyncio.wait([reader])
            assert reader.cancelled()
            held.bytes += 20_000
            with pytest.raises(Problem, match="try again later"):
                one.refuse_beyond()
            one.close()
            held.bytes -= 20_000
        assert held.bytes == 0

    asyncio.run(run())


def test_the_last_event_of_an_answer_is_not_refused() -> None:
    async def run() -> None:
        held = Held(1000, 60.0)
        with Backlog(held) as events:
            held.bytes += 5000
            events.put_nowait(Event(0, "a", [1], [NAMED], reason="length"))
            assert [event.text async for event in _until_ended(events, 1)] == ["a"]

    asyncio.run(run())


def test_an_answer_alone_is_not_told_to_wait_for_others() -> None:
    """What waited to be told beside its log-probabilities was the others' fault."""

    async def run() -> None:
        held = Held(3000, 60.0)
        with Backlog(held) as events:
            events.put_nowait(Event(0, "a", [1], [NAMED]))
            events.put_nowait(Event(0, "a" * 500))
            await events.get()
            assert held.bytes > 3000
            events.refuse_beyond()
            held.bytes += 1
            with pytest.raises(Problem, match="try again later"):
                events.refuse_beyond()
            held.bytes -= 1

    asyncio.run(run())
