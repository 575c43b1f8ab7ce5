"""A server from its first to its last moment: address, signals, and an orderly end.

[Note: draining] On SIGTERM or Ctrl-C the server says that it is not ready and takes no more
questions, but goes on listening, so that whoever asks is told to go elsewhere. Running answers have
`drain_s` seconds; what has not ended then is told so. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lezero.core.errors import ConfigError, need_extra
from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from lezero.serve.server.app import App
from lezero.serve.server.coded import Encoder
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.connection import protocol
from lezero.serve.server.keys import read_keys
from lezero.serve.server.metrics import Metrics
from lezero.serve.server.worker import Worker

if TYPE_CHECKING:
    import uvicorn

_HEADER_BYTES = 1 << 16
_TICK_S = 0.02
_FAREWELL_S = 1.0
"""For clients to be told that their answers have ended."""


class Server:
    """One model at one address. `run` serves until it is told to end; a server runs once.

    Raises `ConfigError` where the address is open to others and there are no keys, or is taken, and
    `MissingExtraError` without uvicorn.
    """

    def __init__(self, llm: LLM, config: ServeConfig | None = None, name: str = "model") -> None:
        self.llm, self.config = llm, config or ServeConfig()
        self.name = self.config.name or name
        self._keys = read_keys(self.config.keys)
        self.config.refuse_if_open(bool(len(self._keys)))
        _uvicorn()
        self.metrics = Metrics()
        room = llm.engine.scheduler.max_requests + self.config.queue
        self.worker = Worker(llm, self.metrics, room)
        self._socket = _listen(self.config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()
        self._at_once = False

    @property
    def url(self) -> str:
        """The address, with the port that was taken."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, ready: Callable[[Server], None] = lambda server: None) -> None:
        """Serves until a signal comes or `stop` is called. ready: called once it answers."""
        try:
            # The first step may build kernels, which takes long: not while a client waits.
            self.llm.generate([[0]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
            asyncio.run(self._serve(ready))
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Begins the end, as SIGTERM does; from any thread. The second time does not wait."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        """Hears the first signal, and the second."""
        self._at_once = self._end.is_set()
        self._end.set()

    async def _serve(self, ready: Callable[[Server], None]) -> None:
        self._loop = asyncio.get_running_loop()
        encoder = Encoder(self.llm)
        self.worker.start()
        self.app = App(
            *(self.llm, self.config),
            name=self.name,
            keys=self._keys,
            worker=self.worker,
            encoder=encoder,
            metrics=self.metrics,
        )
        inner = _inner(self.app, self.config)
        try:
            with _signals(self._stop):
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
            await self.worker.stop()
            encoder.close()

    async def _drain(self) -> None:
        """Waits for running answers, as long as they have; then cancels what is left."""
        self.app.draining = True
        await self._idle(self.config.drain_s, until=lambda: self._at_once)
        self.worker.cancel_all()
        await self._idle(_FAREWELL_S)

    async def _idle(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Waits until nothing is being answered."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.app.active and not until():
                    await asyncio.sleep(_TICK_S)


def serve(llm: LLM, config: ServeConfig, name: str, say: Callable[[str], None] = print) -> None:
    """What `lz serve` does: tells the forecast and the address, serves, and tells what was."""
    server = Server(llm, config, name)
    forecast = llm.forecast
    say(f"model       {server.name}: {llm.program.description}")
    for line in forecast.lines():
        say(line)

    def ready(server: Server) -> None:
        say(f"serving     {server.url} (page), {server.url}/v1 (OpenAI's protocol)")

    server.run(ready)
    worker, metrics = server.worker, server.metrics
    ended = sum(metrics.ended.values())
    say(f"ended       {ended} requests, {metrics.tokens_in} tokens in, {metrics.tokens_out} out")
    if worker.alone_tokens:
        speed = worker.alone_tokens / worker.alone_s
        at_most = forecast.decode_tokens_s
        share = "" if at_most is None else f", {speed / at_most:.0%} of the forecast's ceiling"
        say(f"decode      {speed:,.0f} tokens/s for one request alone{share}")


def _listen(config: ServeConfig) -> socket.socket:
    try:
        kind, *_, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(kind, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"host: got {config.host!r}, which is no address ({error})") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(min(config.connections, socket.SOMAXCONN))
    except OSError as error:
        made.close()
        raise ConfigError(
            f"port: {config.host}:{config.port} cannot be listened on ({error.strerror}); "
            "port 0 takes a free one"
        ) from None
    return made


def _uvicorn() -> None:
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
            http=protocol(config.read_s, config.write_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=config.connections,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=2,
        )
    )


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` for SIGTERM and SIGINT; only the main thread can hear them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    heard = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in heard]
    for number in heard:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number, handler in zip(heard, before, strict=True):
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
