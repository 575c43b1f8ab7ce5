"""The ASGI application: who may ask what, and which function answers.

[Note: other people's pages] A page that a browser shows from somewhere else must not use a model
that listens on this machine. Answers never carry CORS headers; questions must be of a type, as
application/json, that such a page may only send with leave; and on loopback the name that the
client asked for must be this machine's, so that a name that suddenly leads here (DNS rebinding) is
of no use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from lezero.core.errors import LeZeroError
from lezero.core.log import logger
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.exchange import Exchange, Receive, Scope, Send
from lezero.serve.server.face import Face, Handler
from lezero.serve.server.held import Held
from lezero.serve.server.keys import Keys, RateLimit
from lezero.serve.server.page import page
from lezero.serve.server.problem import ClientGoneError, Problem

_LOG = logger("serve")
_STALLED_S = 120.0
_HEALTH = ("GET", "/health")
"""Answered also where there are too many connections: who asks ends a server that is not well."""
_LOCAL_NAMES = {"localhost", "127.0.0.1", "[::1]"}


class App:
    """Answers HTTP over one face: what is open to all, and what needs a key."""

    def __init__(self, face: Face, config: ServeConfig, keys: Keys) -> None:
        self.config, self.face, self.name = config, face, face.name
        self.draining = False
        """Whether no new questions are taken, because the server ends."""
        self.active = 0
        """Questions that are being answered."""
        self.connections: Callable[[], int] = lambda: 0
        """How many are open, that of the client who asks included."""
        self.unsent: Callable[[], int] = lambda: 0
        """Bytes of answers that wait for their clients to read."""
        self.held = Held(config.answers_bytes, config.write_s)
        self._keys, self._created = keys, int(time.time())
        self._rate = None if config.rate is None else RateLimit(config.rate)
        self._open: dict[tuple[str, str], Handler] = {
            ("GET", "/"): self._page,
            _HEALTH: self._health,
            ("GET", "/ready"): self._ready,
        }
        self._guarded: dict[tuple[str, str], Handler] = {
            ("GET", "/metrics"): self._metrics,
            ("GET", "/stats"): self._stats,
            ("GET", "/v1/models"): self._models,
            ("GET", f"/v1/models/{self.name}"): self._model,
            **{("POST", path): handler for path, handler in face.questions().items()},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self.held)
        try:
            await self._answer(exchange)
        except ClientGoneError:
            exchange.status = exchange.status or 499
        except asyncio.CancelledError:
            if self.draining and exchange.status is None:  # its body was still on the way
                await exchange.fail(_shutting_down())
            raise
        except BaseException as error:  # a panic of tokenizers is no Exception
            _LOG.error("a bug in LeZero while answering %s", exchange.path, exc_info=error)
            if exchange.status is None:
                await exchange.fail(Problem(500, "a bug in LeZero; its log tells more"))
        finally:
            exchange.end()
            self.face.answered[self._route(exchange.path), exchange.status or 499] += 1

    def _route(self, path: str) -> str:
        """A path as metrics name it, without what people may write."""
        known = {path for _, path in (*self._open, *self._guarded)}
        if path == f"/v1/models/{self.name}":
            return "/v1/models/{model}"
        return path if path in known else "other"

    async def _answer(self, exchange: Exchange) -> None:
        try:
            handler = self._admit(exchange)
            self.active += exchange.method == "POST"
            try:
                await handler(exchange)
            finally:
                self.active -= exchange.method == "POST"
        except Problem as problem:
            if exchange.status is not None:
                raise
            await exchange.fail(problem)
        except LeZeroError as error:
            if exchange.status is not None:
                raise
            await exchange.fail(Problem(400, str(error)))

    def _admit(self, exchange: Exchange) -> Handler:
        """The function that answers, if the client may ask it."""
        method = "GET" if exchange.method == "HEAD" else exchange.method
        asked = (method, exchange.path)
        if self.connections() > self.config.connections and asked != _HEALTH:
            problem = f"{self.config.connections} connections are open, as many as are taken"
            raise Problem(503, problem, code="overloaded", retry_s=1)
        self._check_host(exchange)
        if asked in self._open:
            return self._open[asked]
        if asked not in self._guarded:
            if exchange.path.startswith("/v1/models/"):
                self._check_client(exchange)  # whatever is said of these tells the model's name
            known = (*self._open, *self._guarded)
            takes = [taken for taken, path in known if path == exchange.path]
            if takes:
                said = f"{exchange.path} does not take {exchange.method[:20]}"
                allow = ", ".join(["GET", "HEAD"] if takes == ["GET"] else takes)
                raise Problem(405, said, allow=allow)
            if exchange.path.startswith("/v1/models/"):
                problem = f"this server has the model {self.name!r}"
                raise Problem(404, problem, param="model", code="model_not_found")
            raise Problem(404, "there is nothing at this path")
        self._check_client(exchange)
        if method == "POST":
            kind = exchange.header("content-type").partition(";")[0].strip().lower()
            if kind not in self.face.kinds:
                allowed = " and ".join(self.face.kinds)
                raise Problem(415, f"content-type: got {kind[:80]!r}, allowed is {allowed}")
            coding = exchange.header("content-encoding").strip().lower()
            if coding not in ("", "identity"):
                problem = f"content-encoding: got {coding[:80]!r}; send the body as it is"
                raise Problem(415, problem)
            self._check_open()
            self.held.refuse_beyond(0)
        return self._guarded[asked]

    def _check_host(self, exchange: Exchange) -> None:
        if not self.config.loopback or "host" not in exchange.headers:
            return  # no browser leaves it out; health checks by HTTP/1.0 do
        host = exchange.header("host").lower()
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        own = {self.config.host, f"[{self.config.host}]", *map(str.lower, self.config.allow_hosts)}
        if name not in _LOCAL_NAMES | own:
            raise Problem(
                421,
                f"host: got {name[:80]!r}, but this server answers to localhost and the names "
                "that it was started with (lz serve --allow-host NAME) alone",
            )

    def _check_client(self, exchange: Exchange) -> None:
        client = exchange.client
        if len(self._keys):
            owner = self._keys.owner(exchange.header("authorization"))
            if owner is None:
                said = "a valid API key is needed, in a header 'Authorization: Bearer KEY'"
                raise Problem(401, said, code="invalid_api_key")
            client = exchange.owner = owner
        if self._rate is not None and exchange.method == "POST":
            wait = self._rate.wait_s(client)
            if wait:
                problem = f"at most {self.config.rate} requests a minute; try again later"
                raise Problem(429, problem, code="rate_limit_exceeded", retry_s=int(wait) + 1)

    def _check_open(self) -> None:
        if self.draining:
            raise _shutting_down()
        if self.face.broken is not None:
            raise Problem(503, "the engine has failed", code="engine_error")

    async def _models(self, exchange: Exchange) -> None:
        await exchange.reply_json(200, {"object": "list", "data": [self._described()]})

    async def _model(self, exchange: Exchange) -> None:
        await exchange.reply_json(200, self._described())

    def _described(self) -> dict[str, Any]:
        described = {"id": self.name, "object": "model", "created": self._created}
        return {**described, "owned_by": "lezero", **self.face.described()}

    async def _health(self, exchange: Exchange) -> None:
        """Whether the engine works: 503 once it is broken, or a step or a text takes minutes."""
        stalled = max(self.face.stalled_s(), self.face.lane_s()) > _STALLED_S
        fine = self.face.broken is None and not stalled
        why = "ok" if fine else "stalled" if stalled else "broken"
        await exchange.reply_json(200 if fine else 503, {"status": why})

    async def _ready(self, exchange: Exchange) -> None:
        """Whether new questions are taken."""
        fine = not self.draining and self.face.broken is None
        why = "ok" if fine else "draining" if self.draining else "broken"
        await exchange.reply_json(200 if fine else 503, {"status": why})

    async def _metrics(self, exchange: Exchange) -> None:
        text = self.face.metrics_text().encode()
        await exchange.reply(200, text, "text/plain; version=0.0.4; charset=utf-8")

    async def _stats(self, exchange: Exchange) -> None:
        await exchange.reply_json(200, {**self.face.stats(), "draining": self.draining})

    async def _page(self, exchange: Exchange) -> None:
        body, policy = page()
        headers = [("content-security-policy", policy), ("referrer-policy", "no-referrer")]
        await exchange.reply(200, body, "text/html; charset=utf-8", headers)


def _shutting_down() -> Problem:
    return Problem(503, "the server is shutting down", retry_s=5)
