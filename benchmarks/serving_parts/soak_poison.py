"""What hostile clients send, and which status each may get; None: the connection just ends."""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from serving_parts.served import Served, post

_REFUSED = {400, 404}
_PATHS = ("/v1/completions", "/v1/chat/completions")


def poison(server: Served, drawn: random.Random) -> str:
    """Sends one of them by chance; says what is wrong with the answer, if anything is."""
    name, send, allowed = drawn.choice(_ALL)
    status = send(server, drawn)
    return "" if status in allowed else f"{name}: got status {status}, allowed are {allowed}"


def answered(connection: socket.socket) -> int | None:
    """The status that comes; None where the connection ends without one."""
    found = b""
    with suppress(ConnectionError):
        while b"\r\n" not in found:
            piece = connection.recv(65536)
            if not piece:
                break
            found += piece
        while connection.recv(65536):  # up to the end, so that the server has said everything
            pass
    return int(found[9:12]) if found[:5] == b"HTTP/" else None


def _raw(data: bytes) -> Callable[[Served, random.Random], int | None]:
    def send(server: Served, drawn: random.Random) -> int | None:
        with server.connect() as connection:
            with suppress(ConnectionError):
                connection.sendall(data)
                if not data.startswith((b"POST", b"GET")):
                    connection.shutdown(socket.SHUT_WR)
            return answered(connection)

    return send


def _body(body: bytes, kind: str = "application/json") -> Callable[..., int | None]:
    def send(server: Served, drawn: random.Random) -> int | None:
        data = post(drawn.choice(_PATHS), body).replace(b"application/json", kind.encode(), 1)
        return _raw(data)(server, drawn)

    return send


def _asked(**fields: Any) -> Callable[..., int | None]:
    return _raw(post("/v1/completions", json.dumps({"prompt": "x", **fields}).encode()))


def _reset(server: Served, drawn: random.Random) -> None:
    """Closes in the middle of its own question, with a reset."""
    data = post("/v1/completions", b'{"prompt": "x", "max_tokens": 50}')
    with server.connect() as connection:
        connection.sendall(data[: drawn.randrange(1, len(data))])
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


_LONG = json.dumps({"prompt": "word " * 2_000_000}).encode()
_FILLS = json.dumps({"prompt": "word " * 150_000}).encode()
_CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
_CLOSE = b"connection: close\r\n\r\n"
_ALL: tuple[tuple[str, Callable[..., int | None], set[int | None]], ...] = (
    ("a prompt of 10 MB", _body(_LONG), {413, None}),
    ("a prompt of 750 kB", _body(_FILLS), _REFUSED),
    ("deep JSON", _body(b'{"prompt": ' + b"[" * 300_000), _REFUSED),
    ("JSON 100 deep", _body(b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}"), _REFUSED),
    ("bytes that are no UTF-8", _body(b'{"prompt": "\xff\xfe"}'), _REFUSED),
    ("half a surrogate pair", _body(b'{"prompt": "\\ud800"}'), _REFUSED),
    ("no JSON", _body(b"{"), _REFUSED),
    ("NaN", _body(b'{"prompt": "x", "messages": 1, "temperature": NaN}'), _REFUSED),
    ("a list", _body(b"[1, 2, 3]"), _REFUSED),
    ("digits", _body(b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}"), _REFUSED),
    ("another type", _body(b'{"prompt": "x"}', "text/plain"), {415}),
    ("tokens that there are not", _asked(prompt=[1, 10**9]), _REFUSED),
    ("negative tokens", _asked(prompt=[-1]), _REFUSED),
    ("a number as prompt", _asked(prompt=1), _REFUSED),
    ("absurd max_tokens", _asked(max_tokens=10**9), _REFUSED),
    ("max_tokens as text", _asked(max_tokens="many"), _REFUSED),
    ("n of 128", _asked(n=128), _REFUSED),
    ("a negative temperature", _asked(temperature=-1), _REFUSED),
    ("a field that is not built", _asked(echo=True), _REFUSED),
    ("a misspelt field", _asked(max_token=1), _REFUSED),
    ("17 stop strings", _asked(stop=["x"] * 17), _REFUSED),
    ("the least temperature", _asked(temperature=5e-324, max_tokens=3, seed=1), {200, 500}),
    ("the largest temperature", _asked(temperature=1e308, max_tokens=3, seed=1), {200, 500}),
    ("a huge penalty", _asked(repetition_penalty=1e300, max_tokens=3), _REFUSED),
    ("a tiny penalty", _asked(repetition_penalty=5e-324, max_tokens=3), _REFUSED),
    ("the least top_p", _asked(top_p=5e-324, max_tokens=3, seed=1), {200}),
    ("long stop strings", _asked(stop=["x" * 1024] * 16, max_tokens=3), {200}),
    ("a greeting of TLS", _raw(b"\x16\x03\x01\x02\x00\x01" * 50), {400, None}),
    ("no HTTP", _raw(b"GET / HTTP/x\r\n\r\n"), {400, None}),
    ("a long header", _raw(b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n"), {400, None}),
    ("broken chunks", _raw(_CHUNKED + b"\r\nnot a number\r\n"), {400, None}),
    ("a strange host", _raw(b"GET /health HTTP/1.1\r\nhost: evil.example\r\n" + _CLOSE), {421}),
    ("nothing there", _raw(b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n" + _CLOSE), {404}),
    ("a reset", _reset, {None}),
)  # fmt: skip
