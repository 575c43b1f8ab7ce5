"""A server from its first to its last moment: address, signals, and an orderly end.

[Note: draining] On SIGTERM, Ctrl-C or SIGHUP (a closed terminal) the server says that it is not
ready and takes no more questions, but goes on listening, so that whoever asks is told to go
elsewhere. Running answers have `drain_s` seconds; what has not ended then is told so. A second
signal does not wait. A step of the model that hangs cannot be ended: a process that does nothing
else ends without it, with status 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

from lezero.core.errors import ConfigError, need_extra
from lezero.core.log import logger
from lezero.serve.server.app import App
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.connection import protocol, unsent
from lezero.serve.server.face import Face
from lezero.serve.server.keys import read_keys
from lezero.serve.server.open_files import room_for_connections

if TYPE_CHECKING:
    import uvicorn

_LOG = logger("serve")
_HEADER_BYTES = 1 << 16
_TICK_S = 0.02
_FAREWELL_S = 1.0
"""For clients to be told that their answers have ended."""
_LAST_STEP_S = 10.0
"""For the step that runs, once nobody waits for it."""


class Host:
    """One face at one address. `run` serves until it is told to end; a host runs once.

    Raises `ConfigError` where the address is open to others and there are no keys, or is taken, and
    `MissingExtraError` without uvicorn.
    """

    def __init__(self, face: Face, config: ServeConfig) -> None:
        self.face, self.config, self.name = face, config, face.name
        self._keys = read_keys(self.config.keys)
        self.config.refuse_if_open(bool(len(self._keys)))
        need_uvicorn()
        self._socket = _listen(self.config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._early, self._starting = 0, threading.Lock()
        self._end = asyncio.Event()
        self._at_once = False

    @property
    def url(self) -> str:
        """The address, with the port that was taken."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(
        self, ready: Callable[[Self], None] = lambda host: None, *, alone: bool = False
    ) -> None:
        """Serves until a signal comes or `stop` is called. ready: called once it answers. alone:
        the process does nothing else, and ends where the last step does not."""
        try:
            with self.face.alone():
                self.face.rehearse()
                with room_for_connections(self.config.connections) as most:
                    self._take(most)
                    asyncio.run(self._serve(ready, alone))
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Begins the end, as SIGTERM does; from any thread, also before `run` serves. The second
        time does not wait."""
        with self._starting:
            if self._loop is None:
                self._early += 1
                return
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stop)

    def _take(self, connections: int) -> None:
        """Takes no more connections than the system allows."""
        if connections < self.config.connections:
            _LOG.warning(
                "at most %d connections are taken, not %d: the system's limit of open files "
                "(ulimit -Hn) allows no more",
                *(connections, self.config.connections),
            )
            self.config = self.config.model_copy(update={"connections": connections})

    def _stop(self) -> None:
        """Hears the first signal, and the second."""
        self._at_once = self._end.is_set()
        self._end.set()

    async def _serve(self, ready: Callable[[Self], None], alone: bool) -> None:
        with self._starting:
            self._loop = asyncio.get_running_loop()
        for _ in range(self._early):
            self._stop()
        self.face.start(alone)
        self.app = App(self.face, self.config, self._keys)
        inner = _inner(self.app, self.config)
        state = inner.server_state
        self.app.connections = lambda: len(state.connections)
        self.app.unsent = lambda: unsent(state.connections)
        with _signals(self._stop, last=alone):
            try:
                listening = asyncio.create_task(inner.serve(sockets=[self._socket]))
                while not inner.started and not listening.done():
                    await asyncio.sleep(_TICK_S)
                ready(self)
                await self._end.wait()
                await self._drain()
                inner.should_exit = True
                inner.force_exit = self._at_once
                await listening
            finally:
                with _patience(self.face) if alone else contextlib.nullcontext():
                    await self.face.stop()

    async def _drain(self) -> None:
        """Waits for running answers, as long as they have; then cancels what is left."""
        self.app.draining = True
        await self._idle(self.config.drain_s, until=lambda: self._at_once)
        self.face.cancel_all()
        await self._idle(_FAREWELL_S)

    async def _idle(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Waits until nothing is being answered, and all answers have left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while (self.app.active or self.app.unsent()) and not until():
                    await asyncio.sleep(_TICK_S)


@contextlib.contextmanager
def _patience(face: Face) -> Iterator[None]:
    """Ends the process where what it is around takes too long."""

    def end() -> None:
        step, lane = face.stalled_s(), face.lane_s()
        what = "a step" if step >= lane else "the reading or writing of a text"
        _LOG.error("%s runs for %.0f s and does not end: left as it is", what, max(step, lane))
        logging.shutdown()
        os._exit(1)

    timer = threading.Timer(_LAST_STEP_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _listen(config: ServeConfig) -> socket.socket:
    try:
        kind, *_, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(kind, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host: got {config.host!r}, which is no address ({error})") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(min(config.connections, socket.SOMAXCONN))
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"host: got {config.host!r}, which is no address of this machine"
            ) from None
        raise ConfigError(
            f"port: {config.host}:{config.port} cannot be listened on ({error.strerror}); "
            "port 0 takes a free one"
        ) from None
    return made


def refuse_if_taken(config: ServeConfig) -> None:
    """Raises `ConfigError` where the address cannot be listened on now."""
    _listen(config).close()


def need_uvicorn() -> None:
    """Raises `MissingExtraError` where there is none."""
    try:
        import uvicorn  # noqa: F401
    except ImportError:
        raise need_extra("serve", "uvicorn", "lz serve") from None


def _inner(app: App, config: ServeConfig) -> uvicorn.Server:
    import uvicorn

    class Inner(uvicorn.Server):
        """uvicorn without its signals, which end it before running answers have ended."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    return Inner(
        uvicorn.Config(
            app,
            http=protocol(config.read_s, config.write_s, config.connections),
            backlog=config.connections,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=2,
        )
    )


@contextlib.contextmanager
def _signals(stop: Callable[[], None], *, last: bool) -> Iterator[None]:
    """Calls `stop` for SIGTERM, SIGINT and (not under `nohup`) SIGHUP; only the main thread hears
    them. last: the process ends behind this, which none of them but SIGINT turns into a failure."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    heard = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        heard.append(signal.SIGHUP)
    before = [signal.getsignal(number) for number in heard]
    for number in heard:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number, handler in zip(heard, before, strict=True):
            loop.remove_signal_handler(number)
            ignored = last and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if ignored else handler)
