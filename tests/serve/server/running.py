"""A server in a thread of the test, and small ways to talk to it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lezero.serve.coder import Coder
from lezero.serve.llm import LLM
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.run import Server
from tests.serve.models import small

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class _Letters:
    """Bytes as tokens; any token reads as a letter, so that random answers are text."""

    vocab_size, eos = 257, 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(32 + token % 95) for token in tokens if token < 256)


def coder(template: str | None = TEMPLATE) -> Coder:
    return Coder(_Letters(), frozenset([_Letters.eos]), template)


def small_llm(template: str | None = TEMPLATE, **options: Any) -> LLM:
    model = small(vocab=_Letters.vocab_size, context=options.pop("longest", 512))
    given = {"weights": "bf16", "cache_bytes": 8 << 20, **options}
    return LLM(model, coder=coder(template), **given)


@dataclass(frozen=True)
class Answered:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.json) == {"error"}
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]


class Client:
    """Speaks HTTP to a server in the plainest way."""

    def __init__(self, server: Server) -> None:
        self.server, self.url = server, server.url
        self.port = int(self.url.rpartition(":")[2])

    def ask(self, path: str, data: object = None, **headers: str) -> Answered:
        """GET, or POST of JSON or bytes."""
        body = data if isinstance(data, bytes | None) else json.dumps(data).encode()
        names = {key.replace("_", "-"): value for key, value in headers.items()}
        if body is not None:
            names.setdefault("content-type", "application/json")
        request = urllib.request.Request(self.url + path, body, names)
        try:
            with urllib.request.urlopen(request, timeout=30) as found:
                return Answered(found.status, _lower(found.headers), found.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answered(error.code, _lower(error.headers), error.read())

    def complete(self, prompt: object, **fields: Any) -> Answered:
        return self.ask("/v1/completions", {"prompt": prompt, **fields})

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def begin(self, data: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
        """Sends a question and gives the open connection."""
        body = json.dumps(data).encode()
        made = self.connect()
        made.sendall(head(path, len(body)) + body)
        return made


def head(path: str, length: int | None, *extra: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [] if length is None else [f"content-length: {length}"]
    return "\r\n".join([*lines, *extra, "", ""]).encode()


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            found += piece
    return found


@contextlib.contextmanager
def serving(llm: LLM, **changes: Any) -> Iterator[Client]:
    """A server on a free port, which must end by itself when it is stopped."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    server = Server(llm, ServeConfig(**{"port": 0, "drain_s": 5.0, **changes}))
    torch.set_num_threads(threads)
    ready = threading.Event()
    thread = threading.Thread(target=lambda: server.run(lambda _: ready.set()))
    thread.start()
    assert ready.wait(120), "it did not start"
    try:
        yield Client(server)
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()
    llm.engine.scheduler.check()
    assert llm.engine.pool.used_count == 0


@contextlib.contextmanager
def slow_steps(llm: LLM, seconds: float = 0.05) -> Iterator[threading.Event]:
    """Each step waits so long first, until the event is set: an answer of such a small model ends
    in some milliseconds, before a test has seen that it runs."""
    step, quick = llm.engine.step, threading.Event()
    llm.engine.step = lambda: (quick.wait(seconds), step())[1]  # type: ignore[method-assign]
    try:
        yield quick
    finally:
        quick.set()
        llm.engine.step = step  # type: ignore[method-assign]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
