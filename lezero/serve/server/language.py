"""The face of a language model: chat, completions, embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from lezero.serve.llm import LLM
from lezero.serve.rehearsal import Paces, rehearse
from lezero.serve.server.answers import Answerer
from lezero.serve.server.asked import Form, read_asked
from lezero.serve.server.coded import Encoder, TokenText
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.embedded import embeddings_body
from lezero.serve.server.embedding import read_embeddings
from lezero.serve.server.exchange import JSON, Exchange, Value, parse, within
from lezero.serve.server.face import Face, Handler
from lezero.serve.server.lanes import Lanes
from lezero.serve.server.metrics import Metrics
from lezero.serve.server.stats import gauges, stats
from lezero.serve.server.worker import Worker
from lezero.serve.template import need_sound_sandbox

_LONG_BODY = 1 << 16
"""Bytes from which on reading it takes milliseconds."""


class LanguageFace(Face):
    """One `LLM`; see the routes in `questions`. Raises `LeZeroError` where its chat template cannot
    run safely, before clients ask."""

    def __init__(self, llm: LLM, config: ServeConfig, name: str) -> None:
        if llm.coder is not None and llm.coder.template is not None:
            need_sound_sandbox()
        self.llm, self.name, self._config = llm, name, config
        self.metrics, self.tried = Metrics(), Paces()
        self.answered = self.metrics.answered
        room = llm.engine.scheduler.max_requests + config.queue
        self.worker = Worker(llm, self.metrics, room)

    @property
    def broken(self) -> str | None:
        return self.worker.broken

    def stalled_s(self) -> float:
        return self.worker.stalled_s()

    def lane_s(self) -> float:
        return self._lanes.stalled_s()

    def alone(self) -> AbstractContextManager[None]:
        return self.llm.served()

    def rehearse(self) -> None:
        self.tried = rehearse(self.llm.engine, self.llm.room)

    def start(self, alone: bool) -> None:
        self._lanes = Lanes("lezero-encoder")
        self._encoder = Encoder(self.llm, self._lanes)
        self._answerer = Answerer(
            *(self.worker, self._encoder, self._lanes, TokenText(self.llm.coder)),
            *(self.name, self._config.request_s),
        )
        self.worker.start(alone)

    async def stop(self) -> None:
        await self.worker.stop()
        self._lanes.close()

    def cancel_all(self) -> None:
        self.worker.cancel_all()

    def questions(self) -> Mapping[str, Handler]:
        return {
            "/v1/chat/completions": lambda exchange: self._question(exchange, "chat"),
            "/v1/completions": lambda exchange: self._question(exchange, "text"),
            "/v1/embeddings": self._embed,
        }

    def described(self) -> dict[str, Any]:
        return {"max_model_len": self.llm.room}

    def metrics_text(self) -> str:
        return self.metrics.text(gauges(self.worker))

    def stats(self) -> dict[str, Any]:
        return stats(self.llm, self.worker, self.name)

    async def _question(self, exchange: Exchange, form: Form) -> None:
        asked = await self._read(exchange, lambda data: read_asked(form, data, self.name))
        await self._answerer.answer(exchange, asked)

    async def _embed(self, exchange: Exchange) -> None:
        asked = await self._read(exchange, lambda data: read_embeddings(data, self.name, None))
        told = await embeddings_body(
            *(exchange, asked),
            worker=self.worker,
            encoder=self._encoder,
            lanes=self._lanes,
            model=self.name,
            seconds=self._config.request_s,
        )
        await exchange.reply(200, told, JSON)

    async def _read(self, exchange: Exchange, read: Callable[[dict[str, Any]], Value]) -> Value:
        """What is asked in a body, which is read beside the event loop where it is long."""
        config = self._config
        body = await exchange.read(config.body_bytes, config.read_s)
        if len(body) < _LONG_BODY:
            return read(parse(body))
        lane = self._lanes.of(len(body))
        lane.refuse_beyond(self.worker.room)
        async with within(config.request_s):
            return await exchange.unless_gone(lane.run(lambda: read(parse(body))))
