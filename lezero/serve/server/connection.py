"""Connections that do not last for ever: uvicorn's, with limits on slow senders and readers.

uvicorn waits without end for the headers of a request, and for a client to read its answer.

[Note: too many] Where more connections are open than are taken, those that have asked nothing for a
while give way, beginning with those that have been silent for the longest: as another connection is
made, and once more a while later, since none is made any more where they hold all open files. Where
there are none, as at a burst of questions, `App` tells those who ask that there are too many. Who
still reads an answer is not silent, as long as a slow reader may take.

[Note: answers that end early] uvicorn closes a connection whose answer was given up once its client
has read what was written. Few bytes may be left then, which no timer waits for, so it is cut off.

[Note: readers] A client is cut off that takes nothing for `write_s`, though it is to have more. How
much waits here does not tell: the system holds some MiB, and asks for more only once a third of
them has left, which takes a slow reader minutes; and one answer may have left while as much of the
next has come. What the client's system acknowledged tells; it asks for more in steps of up to half
of its own room, so that who reads less than one of these in `write_s` is cut off too.

[Note: bytes behind a request] uvicorn stops reading at the first byte behind a request until that
is answered, and so would not see its client leave. It goes on reading here, up to a bound that
pipelined requests keep within. Empty lines before a request are ignored, since some clients end a
body with one that its length does not count (RFC 9112, 2.2), and so is all behind the last request.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lezero.serve.server.exchange import JSON, as_json
from lezero.serve.server.problem import Problem

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol


_SILENT_S = 1.0
"""For a client to ask whole; after that it gives way."""
_LOOKS = 4
"""Times in `write_s` that a client is looked at which has not taken all of its answer."""
_SHOWN = 200
"""Letters of what breaks HTTP's rules."""
_BEHIND = 1 << 16
"""Bytes that may wait behind the request that is being answered."""


class _Limited:
    """What `protocol` adds to uvicorn's without regard to other connections."""

    reader: type[Any]
    app: Any
    cycle: Any
    conn: Any
    flow: Any
    scope: Any
    transport: Any
    _reading: asyncio.TimerHandle | None = None
    _looking: asyncio.TimerHandle | None = None
    _resumed = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._app, self.app = self.app, self._answer
        self.conn.__class__ = self.reader

    async def _answer(self, *asked: Any) -> None:
        """Runs the application. See [Note: answers that end early]."""
        cycle = self.cycle
        try:
            await self._app(*asked)
        finally:
            if cycle.response_started and not cycle.response_complete:
                self.transport.abort()

    def handle_events(self) -> None:
        super().handle_events()  # type: ignore[misc]
        if self.conn.dropped > _BEHIND:
            self.transport.abort()
            return
        if self.flow.read_paused and not self._between() and not self.cycle.more_body:
            # See [Note: bytes behind a request].
            if len(self.conn.trailing_data[0]) > _BEHIND:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        import h11

        if not _answered(self.cycle):
            status, msg = self.conn.refused or (400, msg)
            body = as_json(Problem(status, msg).body())
            sent = b"" if not self._between() and self.scope["method"] == "HEAD" else body
            kind = [("content-type", JSON), ("content-length", str(len(body)))]
            head = h11.Response(status_code=status, headers=[*kind, ("connection", "close")])
            for event in (head, h11.Data(data=sent), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _between(self) -> bool:
        """Whether no request is being answered, so that what comes are headers."""
        return self.cycle is None or self.cycle.response_complete


def _reader() -> type[Any]:
    """h11's connection that ignores what is no request, see [Note: bytes behind a request], and
    knows what it refused: the status to answer with, and why."""
    import h11

    class Reader(h11.Connection):
        dropped = 0
        refused: tuple[int, str] | None = None

        def next_event(self) -> Any:
            buffer = self._receive_buffer
            if self.their_state is h11.IDLE:
                waiting = bytes(buffer)
                buffer.maybe_extract_at_most(len(waiting) - len(waiting.lstrip(b"\r\n")))
            elif self.their_state is h11.MUST_CLOSE:
                self.dropped += len(buffer)
                buffer.maybe_extract_at_most(len(buffer))
            try:
                return super().next_event()
            except h11.RemoteProtocolError as error:
                long = error.error_status_hint == 431
                why = f"more than {self._max_incomplete_event_size} bytes of headers"
                why = why if long else str(error)[:_SHOWN]
                self.refused = error.error_status_hint, f"this is no HTTP request: {why}"
                raise

    return Reader


def protocol(read_s: float, write_s: float, most: int) -> type[H11Protocol]:
    """uvicorn's protocol, which drops a client that takes `read_s` seconds for its headers, or
    `write_s` seconds to make room for more of its answer. most: connections; see
    [Note: too many]."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    # Connections with no whole question, and since when; those that are silent the longest first.
    silent: dict[H11Protocol, float] = {}

    class Connection(_Limited, H11Protocol):
        """See `protocol`."""

        reader = _reader()

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._reading = self.loop.call_later(read_s, transport.abort)
            self._note_silence()
            self._give_way()
            if len(self.connections) > most:
                self.loop.call_later(_SILENT_S, self._give_way)

        def _give_way(self) -> None:
            now = self.loop.time()
            idle = [x for x, since in silent.items() if now - since >= _patience(x, write_s)]
            for other in idle[: max(0, len(self.connections) - most)]:
                other.transport.abort()

        def data_received(self, data: bytes) -> None:
            if self._between() and self._reading is None:
                self._reading = self.loop.call_later(read_s, self.transport.abort)
            super().data_received(data)
            if not self._between():
                self._stop_reading()
            self._note_silence()

        def on_response_complete(self) -> None:
            super().on_response_complete()  # which may begin with the next question
            self._note_silence()
            self._wait_for_reader()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._wait_for_reader()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._resumed += 1

        def _wait_for_reader(self) -> None:
            """See [Note: readers]."""
            if self._looking is None and self.transport.get_write_buffer_size():
                self._look_later(self._taken(), 1)

        def _look_later(self, taken: tuple[int, ...], looks: int) -> None:
            wait = write_s / _LOOKS
            self._looking = self.loop.call_later(wait, self._look, taken, looks)

        def _look(self, before: tuple[int, ...], looks: int) -> None:
            self._looking = None
            if any(now > then for now, then in zip(self._taken(), before, strict=True)):
                self._wait_for_reader()
            elif looks < _LOOKS:
                self._look_later(before, looks + 1)
            else:
                self.transport.abort()

        def _taken(self) -> tuple[int, ...]:
            """Of these one grows as the client takes more."""
            made, left = self.transport.get_extra_info("socket"), unsent([self])
            return _acknowledged(made), self._resumed, -left

        def connection_lost(self, exc: Exception | None) -> None:
            silent.pop(self, None)
            self._stop_reading()
            if self._looking is not None:
                self._looking.cancel()
            super().connection_lost(exc)

        def _note_silence(self) -> None:
            """Notes since when there is no whole question, or that there is one."""
            if self._between() or self.cycle.more_body:
                silent.setdefault(self, self.loop.time())
            else:
                silent.pop(self, None)

    return Connection


def _patience(connection: Any, write_s: float) -> float:
    """Seconds of silence after which a connection gives way."""
    return max(write_s, _SILENT_S) if unsent([connection]) else _SILENT_S


def _acknowledged(made: socket.socket) -> int:
    """Bytes that the client's system has taken so far; 0 where this one does not tell."""
    if not hasattr(socket, "TCP_INFO"):
        return 0
    place = slice(120, 128)  # tcpi_bytes_acked of Linux's struct tcp_info
    return int.from_bytes(
        made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)[place], sys.byteorder
    )


def unsent(connections: Iterable[Any]) -> int:
    """Bytes that wait for clients to read them."""
    return sum(one.transport.get_write_buffer_size() for one in connections)


def _answered(cycle: Any) -> bool:
    """Whether an answer has begun to a question whose body breaks HTTP's rules. Whoever answers it
    hears that the client has left."""
    if cycle is None or cycle.response_complete:
        return False
    cycle.disconnected = True
    cycle.message_event.set()
    return bool(cycle.response_started)
