"""How long a connection may take to ask and to read, and which one gives way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from lezero.serve.server import connection
from lezero.serve.server.connection import protocol

ASKED = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
PIECE = 1 << 16
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Pair]]


@contextlib.asynccontextmanager
async def answering(
    pieces: int = 1, rest_s: float = 0.0, ends: int | None = None, **limits: Any
) -> AsyncIterator[tuple[Connect, ServerState]]:
    """Answers each question with pieces of `PIECE` bytes, after a rest; after as many as `ends` it
    gives up."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(rest_s)
        size = str(pieces * PIECE).encode()
        headers = [(b"content-length", size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(pieces):
            if number == ends:
                raise asyncio.CancelledError
            body = {"type": "http.response.body", "body": b"x" * PIECE, "more_body": True}
            await send(body)
        await send({"type": "http.response.body", "body": b""})

    given = {"read_s": 20.0, "write_s": 20.0, "most": 100, **limits}
    quiet: Any = {"lifespan": "off", "log_config": None, "access_log": False}
    config = uvicorn.Config(app, http=protocol(**given), timeout_keep_alive=60, **quiet)
    config.load()
    state = ServerState()
    made = partial(
        config.http_protocol_class,  # type: ignore[arg-type]
        **{"config": config, "server_state": state, "app_state": {}},
    )
    server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with contextlib.AsyncExitStack() as stack:

        async def connect() -> Pair:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=PIECE)
            stack.callback(writer.close)
            return reader, writer

        yield connect, state
    server.close()
    for one in list(state.connections):
        one.transport.abort()  # type: ignore[union-attr]
    await asyncio.gather(*state.tasks)


async def ask(pair: Pair, pieces: int = 1) -> None:
    """Asks once and reads the answer."""
    reader, writer = pair
    writer.write(ASKED)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    await reader.readexactly(pieces * PIECE)


async def is_cut(pair: Pair) -> bool:
    try:
        return await pair[0].read(1) == b""
    except ConnectionError:
        return True


def test_a_slow_sender_of_the_next_headers_is_cut_off() -> None:
    async def run() -> None:
        async with answering(read_s=0.2) as (connect, _):
            pair = await connect()
            for _ in range(2):
                await ask(pair)
            cut = asyncio.create_task(is_cut(pair))
            for letter in ASKED[:20]:  # takes 0.8 s in all
                with contextlib.suppress(ConnectionError):
                    pair[1].write(bytes([letter]))
                await asyncio.sleep(0.04)
            assert cut.done()
            assert await cut

    asyncio.run(asyncio.wait_for(run(), 10))


def test_an_answer_may_take_longer_than_the_headers() -> None:
    async def run() -> None:
        async with answering(rest_s=0.3, read_s=0.1) as (connect, _):
            pair = await connect()
            for _ in range(2):
                await ask(pair)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_slow_reader_that_does_read_gets_its_whole_answer() -> None:
    async def run() -> None:
        pieces, write_s = 300, 1.0  # takes 1.5 s in all
        async with answering(pieces, write_s=write_s) as (connect, _):
            reader, writer = await connect()
            writer.write(ASKED)
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(pieces):
                await reader.readexactly(PIECE)
                await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_connection_that_was_answered_and_is_silent_gives_way(monkeypatch: Any) -> None:
    async def run() -> None:
        async with answering(most=1) as (connect, state):
            first = await connect()
            await ask(first)
            second = await connect()
            await ask(second)
            assert len(state.connections) == 2, "not silent for long"
            monkeypatch.setattr(connection, "_SILENT_S", 0.0)
            await ask(await connect())
            assert await is_cut(first)
            assert await is_cut(second)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_who_sends_little_by_little_counts_as_silent(monkeypatch: Any) -> None:
    async def run() -> None:
        monkeypatch.setattr(connection, "_SILENT_S", 0.15)
        async with answering(most=1) as (connect, _):
            first = await connect()
            for letter in ASKED[:10]:
                first[1].write(bytes([letter]))
                await asyncio.sleep(0.03)
            await ask(await connect())
            assert await is_cut(first)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_who_has_left_gives_no_way_for_others(monkeypatch: Any) -> None:
    async def run() -> None:
        monkeypatch.setattr(connection, "_SILENT_S", 0.0)
        async with answering(most=1) as (connect, state):
            first = await connect()
            await ask(first)
            first[1].close()
            while state.connections:
                await asyncio.sleep(0.005)
            second = await connect()
            await ask(second)
            await ask(await connect())
            assert await is_cut(second)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_an_answer_that_was_given_up_leaves_no_connection() -> None:
    """Where few bytes are left, whose client has stopped reading: no timer runs for these."""

    async def run() -> None:
        async with answering(pieces=2, ends=1, rest_s=0.05) as (connect, state):
            _, writer = await connect()
            with socket.socket() as silent:
                silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
                silent.connect(writer.get_extra_info("peername"))
                silent.sendall(ASKED)
                while len(state.connections) < 2 or not state.tasks:
                    await asyncio.sleep(0.001)
                for one in state.connections:
                    system: socket.socket = one.transport.get_extra_info("socket")  # type: ignore[union-attr]
                    system.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
                await asyncio.gather(*state.tasks, return_exceptions=True)
                while len(state.connections) > 1:
                    await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_what_comes_behind_the_last_request_has_an_end_too() -> None:
    async def run() -> None:
        async with answering(rest_s=5.0) as (connect, _):
            pair = await connect()
            pair[1].write(ASKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            cut = asyncio.create_task(is_cut(pair))
            for _ in range(5):  # in pieces, as more than is read at once would be one
                with contextlib.suppress(ConnectionError):
                    pair[1].write(b"x" * (1 << 14))
                await asyncio.sleep(0.05)
            assert await asyncio.wait_for(cut, 2)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_client_that_closes_its_sending_side_has_left() -> None:
    """What comes first of one that closes its socket is the same."""

    async def run() -> None:
        async with answering(rest_s=0.5) as (connect, state):
            pair = await connect()
            pair[1].write(ASKED)
            pair[1].write_eof()
            assert await is_cut(pair)
            assert not state.connections

    asyncio.run(asyncio.wait_for(run(), 10))
