"""Clients that read a long answer slowly, but do read it; and others that the server must not wait
for, or must not give up for."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from lezero.serve.llm import LLM
from lezero.serve.server import answers, connection
from lezero.serve.server.exchange import Exchange
from tests.serve.server.running import Client, head, read_all, serving, small_llm, until

BODY = b"0123456789abcdef" * (1 << 20)  # 16 MiB: more than the system takes at once


def with_long_answer(client: Client) -> None:
    async def long(exchange: Exchange) -> None:
        await exchange.reply(200, BODY, "text/plain")

    client.server.app._guarded["GET", "/long"] = long


LAST = b"GET /long HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def asked(client: Client, question: bytes = LAST) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    made.settimeout(20)
    made.connect(("127.0.0.1", client.port))
    made.sendall(question)
    return made


def read_slowly(made: socket.socket, seconds: float) -> bytes:
    """All that comes, at a steady rate that takes so long."""
    pieces, rest = [], seconds * (1 << 16) / len(BODY)
    while piece := made.recv(1 << 16):
        pieces.append(piece)
        time.sleep(rest * len(piece) / (1 << 16))
    return b"".join(pieces).partition(b"\r\n\r\n")[2]


SOME = b"GET /some HTTP/1.1\r\nhost: localhost\r\n\r\n"


def left_little(client: Client) -> tuple[socket.socket, int]:
    """Asks until something waits in the server, behind what the system holds: less than asyncio
    takes for much. Returns how often, too."""

    async def some(exchange: Exchange) -> None:
        await exchange.reply(200, bytes(1 << 15), "text/plain")

    state = client.server.app
    state._guarded["GET", "/some"] = some
    made, times = asked(client, SOME), 1
    while not state.unsent():
        made.sendall(SOME)
        times += 1
        time.sleep(0.01)
    assert state.unsent() <= 1 << 16
    return made, times


def read_on(made: socket.socket) -> bool:
    """Whether anything was there to read."""
    try:
        return bool(made.recv(1 << 20))
    except BlockingIOError:
        return False


def test_a_steady_reader_may_take_longer_than_a_client_that_does_not_read() -> None:
    with serving(small_llm(), write_s=1.0) as client:
        with_long_answer(client)
        with asked(client) as made:
            assert read_slowly(made, 2.5) == BODY


def test_reading_an_answer_is_no_part_of_the_time_that_it_may_take(monkeypatch: Any) -> None:
    monkeypatch.setattr(answers, "as_json_in_parts", lambda _: BODY)
    with serving(small_llm(), request_s=1.0) as client, client.connect() as made:
        body = b'{"prompt": "abc", "max_tokens": 2}'
        made.sendall(head("/v1/completions", len(body), "connection: close") + body)
        assert read_slowly(made, 2.5) == BODY


def test_an_end_waits_for_answers_that_are_on_their_way() -> None:
    with serving(small_llm(), drain_s=20.0) as client:
        with_long_answer(client)
        with asked(client) as made:
            made.recv(1, socket.MSG_PEEK)
            client.server.stop()
            assert read_slowly(made, 3.0) == BODY


def test_an_end_does_not_wait_longer_than_it_may_for_a_client_that_does_not_read() -> None:
    with serving(small_llm(), drain_s=0.3) as client:
        with_long_answer(client)
        with asked(client) as made:
            made.recv(1, socket.MSG_PEEK)
            began = time.monotonic()
            client.server.stop()
            until(lambda: client.server._loop is None or client.server._loop.is_closed(), 15)
            assert time.monotonic() - began < 8


def test_who_leaves_little_unread_is_dropped_too() -> None:
    """Less than asyncio takes for much, behind what the system holds."""
    with serving(small_llm(), write_s=1.0) as client:
        made, _ = left_little(client)
        with made:
            until(lambda: client.server.app.connections() == 0, 5)


def test_a_slow_reader_of_what_the_system_holds_is_not_dropped() -> None:
    """For long the system takes nothing more from the server, since it holds some MiB."""
    with serving(small_llm(), write_s=0.5) as client:
        state = client.server.app
        made, times = left_little(client)
        with made:
            left, got, began = state.unsent(), b"", time.monotonic()
            while time.monotonic() - began < 1.5:
                got += made.recv(1 << 10)
                time.sleep(0.005)
            assert state.unsent() == left
            made.sendall(SOME.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            got += read_all(made)
        assert got.count(b" 200 ") == times + 1


def test_a_steady_reader_is_not_dropped_where_the_system_tells_nothing(monkeypatch: Any) -> None:
    """As on macOS: what waits in the server then goes up and down."""
    monkeypatch.setattr(connection, "_acknowledged", lambda _: 0)
    with serving(small_llm(), write_s=0.5) as client:

        async def parts(exchange: Exchange) -> None:
            await exchange.begin_events()
            for _ in range(len(BODY) // 20_000):
                await exchange.send_events([BODY[:20_000]])
            await exchange.end_events()

        client.server.app._guarded["GET", "/long"] = parts
        with asked(client) as made:
            told = read_slowly(made, 2.0)
        assert told.count(BODY[:20_000]) == len(BODY) // 20_000


def test_who_read_one_answer_may_take_long_for_the_next() -> None:
    with serving(small_llm(), write_s=0.5) as client:
        with_long_answer(client)
        made, _ = left_little(client)
        with made:
            made.setblocking(False)
            until(lambda: not read_on(made) and not client.server.app.unsent())
            made.settimeout(20)
            made.sendall(LAST)
            assert read_slowly(made, 1.5).endswith(BODY)


def test_who_reads_an_answer_does_not_give_way(monkeypatch: Any) -> None:
    monkeypatch.setattr(connection, "_SILENT_S", 0.1)
    with serving(small_llm(), connections=1) as client:
        with_long_answer(client)
        with asked(client) as made:
            made.recv(1, socket.MSG_PEEK)
            body: list[bytes] = []
            reading = threading.Thread(target=lambda: body.append(read_slowly(made, 1.5)))
            reading.start()
            while reading.is_alive():
                with client.connect():
                    time.sleep(0.1)
            reading.join()
        assert body == [BODY]


def test_the_health_is_told_where_there_are_too_many_connections() -> None:
    with serving(small_llm(), connections=1) as client, client.connect():
        until(lambda: client.server.app.connections() == 1)
        assert client.ask("/health").status == 200
        assert client.ask("/ready").status == 503


def test_an_end_waits_for_no_question_that_was_refused() -> None:
    with serving(small_llm()) as client, client.connect() as made:
        made.sendall(head("/nothing", 1))
        made.recv(1, socket.MSG_PEEK)
        assert client.server.app.active == 0
        assert b" 404 " in read_all(made)


def test_what_never_fits_is_refused_before_there_are_n_of_it(monkeypatch: Any) -> None:
    with serving(small_llm(longest=128)) as client:
        looked: list[int] = []
        real = LLM._known_tokens

        def known(self: LLM, prompt: Any, name: str) -> list[int]:
            looked.append(len(prompt))
            return real(self, prompt, name)

        monkeypatch.setattr(LLM, "_known_tokens", known)
        found = client.complete([0] * 5000, n=8, max_tokens=4)
        assert found.status == 400
        assert found.error["code"] == "context_length_exceeded"
        assert found.error["param"] == "prompt"
        assert looked == [5000, 5000]
        looked.clear()
        answers = client.complete([1, 2, 3], n=4, max_tokens=8, temperature=1, seed=3).json
        assert looked == [3, 3]
        texts = [choice["text"] for choice in answers["choices"]]
        assert len(texts) == 4
        assert len(set(texts)) > 1
        assert answers["usage"]["prompt_tokens"] == 3


def test_what_comes_after_the_end_is_told(monkeypatch: Any) -> None:
    """A question that was let in before, and whose prompt was still being read."""
    with serving(small_llm(), drain_s=0.1) as client:
        gate, begun = threading.Event(), threading.Event()
        real = LLM._known_tokens

        def known(self: LLM, prompt: Any, name: str) -> list[int]:
            begun.set()
            assert gate.wait(20)
            return real(self, prompt, name)

        monkeypatch.setattr(LLM, "_known_tokens", known)
        with client.begin({"prompt": "abc", "max_tokens": 400}) as made:
            assert begun.wait(20)
            worker = client.server.worker
            client.server.stop()
            until(lambda: worker._closing)
            gate.set()
            told = read_all(made)
        assert b" 503 " in told.partition(b"\r\n")[0]
        assert b"the server is shutting down" in told
