"""One HTTP request and its answer, over ASGI.

A body comes from anyone: it is read up to a limit of bytes and of seconds, must be UTF-8 and JSON,
without numbers that JSON lacks, and not deep.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn, TypeGuard, TypeVar
from urllib.parse import unquote

from lezero.serve.pairs import name_twice
from lezero.serve.server.held import Held
from lezero.serve.server.problem import ClientGoneError, Problem

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Sequence[tuple[str, str]]
Value = TypeVar("Value")

JSON = "application/json"
_DEEPEST = 32
_LINGER_S = 1.0
PIECE = 1 << 16
"""Bytes of a body that are sent at once. Behind each the client is waited for: whoever reads a long
answer slowly reads it."""
_ALWAYS = (("x-content-type-options", "nosniff"), ("cache-control", "no-store"))


class Exchange:
    """What the client sent, and a way to answer it once. held: what counts the bytes of both."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, held: Held) -> None:
        self._receive, self._send = receive, send
        self.held, self._bytes = held, 0
        authority, self.path = _target(scope)
        self.method = str(scope["method"])
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        if authority is not None:
            self.headers = {**self.headers, "host": authority}
        self.client = str((scope.get("client") or ("",))[0])
        self.owner = ""
        """The name of the API key that was given."""
        self.status: int | None = None
        """The status that was answered; None: nothing yet."""
        self._unread = "transfer-encoding" in self.headers
        self._unread |= self.headers.get("content-length", "0") != "0"
        self._late, self.asked_s = False, 0.0
        """When the body had come."""
        self._closes = {"transfer-encoding", "content-length"} <= self.headers.keys()
        """Two lengths: who passed the request on may have taken the other one (RFC 9112, 6.1)."""

    def header(self, name: str) -> str:
        return self.headers.get(name, "")

    async def read(self, limit: int, seconds: float) -> bytes:
        """The whole body. Raises `Problem` when it is too long (before it is read), too slow, or
        too much beside others'."""
        declared = self.header("content-length")
        if declared.isdigit() and int(declared[:20]) > limit:
            self._too_long(limit)
        data = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    piece = message.get("body", b"")
                    data += piece
                    self.held.bodies += len(piece)
                    if len(data) > limit:
                        self._too_long(limit)
                    self.held.refuse_body(len(data))
                    if not message.get("more_body", False):
                        self._unread, self.asked_s = False, time.monotonic()
                        return bytes(data)
        except TimeoutError:
            self._late = True
            raise Problem(408, f"the body did not come within {seconds:g} s") from None
        finally:
            self.held.bodies -= len(data)
            data.clear()  # the traceback of an error has it until that is answered

    def _too_long(self, limit: int) -> NoReturn:
        raise Problem(
            413, f"the body is too long: at most {limit} bytes are taken", code="body_too_long"
        )

    def expect(self, length: int) -> None:
        """Counts an answer of about so many bytes, numbers and body, before that is made. Raises
        `Problem` (503) where that is too much beside others."""
        self.held.refuse_beyond(length)
        self._hold(length)

    def end(self) -> None:
        """The answer takes no memory any more."""
        self._hold(0)

    def _hold(self, length: int) -> None:
        self.held.bytes += length - self._bytes
        self._bytes = length

    async def gone(self) -> None:
        """Returns when the client has closed its connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def unless_gone(self, work: Awaitable[Value]) -> Value:
        """What `work` gives; cancels it and raises `ClientGoneError` when the client leaves."""
        going, leaving = asyncio.ensure_future(work), asyncio.ensure_future(self.gone())
        try:
            await asyncio.wait((going, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not going.done():
                raise ClientGoneError
            return going.result()
        finally:
            going.cancel()
            leaving.cancel()

    async def reply(self, status: int, body: bytes, kind: str, headers: Headers = ()) -> None:
        """Answers, and closes the connection where the client still sends its body."""
        self._closes |= self._unread
        self._hold(len(body))
        await self._start(status, kind, [*headers, ("content-length", str(len(body)))])
        lingers = self._unread and not self._late
        with self.held.sending():
            for first in range(0, max(1, len(body)), PIECE):
                more = lingers or first + PIECE < len(body)
                piece = body[first : first + PIECE]
                await self._send({"type": "http.response.body", "body": piece, "more_body": more})
        if lingers:
            # Closing now would reset the connection, and the client might not read the answer.
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    while (await self._receive()).get("more_body", False):
                        pass
            await self._send({"type": "http.response.body", "body": b""})

    async def reply_json(self, status: int, value: object, headers: Headers = ()) -> None:
        await self.reply(status, as_json(value), JSON, headers)

    async def fail(self, problem: Problem) -> None:
        await self.reply_json(problem.status, problem.body(), problem.headers())

    async def begin_events(self) -> None:
        """Begins an answer of server-sent events."""
        await self._start(200, "text/event-stream; charset=utf-8", [("x-accel-buffering", "no")])

    async def send_events(self, events: Sequence[bytes]) -> None:
        """Sends the data of some events, each without line breaks."""
        body = b"".join(b"data: %b\n\n" % event for event in events)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end_events(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, kind: str, headers: Headers) -> None:
        assert self.status is None, "a request is answered once"
        self.status = status
        pairs = [("content-type", kind), *_ALWAYS, *headers]
        pairs += [("connection", "close")] if self._closes else []
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})


_ABSOLUTE = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)


def _target(scope: Scope) -> tuple[str | None, str]:
    """Host and path of the request's target. A target without a host has None: the header counts.
    With one, as clients send it that take the server for a proxy, it counts before the header (RFC
    9112, 3.2.2)."""
    found = _ABSOLUTE.fullmatch(scope.get("raw_path") or b"")
    if found is None:
        return None, str(scope["path"])
    host, path = found.groups()
    return host.decode("latin-1"), unquote((path or b"/").decode("latin-1"))


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Raises `Problem` (504) for what takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Problem(504, f"not ended within {seconds:g} s") from None


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def as_json(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


def as_json_in_parts(value: object, deep: int = 5) -> bytes:
    """The same for long values in a thread: in small parts, since other threads wait for each. An
    iterator becomes an array, of which one item is there at a time."""
    if deep and isinstance(value, dict):
        pairs = (as_json(k) + b":" + as_json_in_parts(x, deep - 1) for k, x in value.items())
        return b"{" + b",".join(pairs) + b"}"
    if deep and (isinstance(value, Iterator) or _holds_objects(value)):
        return b"[" + b",".join(as_json_in_parts(x, deep - 1) for x in value) + b"]"
    return as_json(value)


def _holds_objects(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict | list)


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object from bytes that may be anything; `Problem` (400) says what is wrong. A byte
    order mark before it, which some clients write, counts for nothing (RFC 8259, 8.1)."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Problem(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        found = _READER.decode(text.removeprefix("\ufeff"))
    except RecursionError:
        raise Problem(400, _TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise Problem(400, f"the body is not JSON: {error}") from None
    except ValueError:  # Python's bound for whole numbers
        most = sys.get_int_max_str_digits()
        raise Problem(400, f"the body has a number of more than {most} digits") from None
    if not isinstance(found, dict):
        raise Problem(400, "the body is JSON, but not an object")
    _check(found)
    return found


_TOO_DEEP = f"the body is nested more than {_DEEPEST} deep"


def _no_number(text: str) -> NoReturn:
    """For NaN and infinities, which Python's reader would take."""
    raise Problem(400, f"the body is not JSON: {text} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python's reader would take the last of values under one name, and pass over the others."""
    twice = name_twice(pairs)
    if twice is not None:
        raise Problem(
            400, f"the body has {twice[:80]!a} twice in one object; leave one of them out"
        )
    return dict(pairs)


_READER = json.JSONDecoder(parse_constant=_no_number, object_pairs_hook=_object)


def _check(found: object) -> None:
    """Refuses what is deep, and halves of surrogate pairs, which are no text."""
    level: list[object] = [found]
    for _ in range(_DEEPEST):
        deeper: list[object] = []
        for item in level:
            if isinstance(item, dict):
                deeper += [*item, *item.values()]
            elif isinstance(item, list):
                deeper += item
            elif isinstance(item, str) and not _is_text(item):
                raise Problem(400, "the body holds half of a surrogate pair, which is no text")
        if not deeper:
            return
        level = deeper
    raise Problem(400, _TOO_DEEP)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
