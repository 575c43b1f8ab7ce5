"""The face of a language model: chat, completions, embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lezero.core.errors import LeZeroError
from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from lezero.serve.server.answers import Answerer
from lezero.serve.server.asked import Form, read_asked
from lezero.serve.server.coded import Encoder, TokenText
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.embedded import answer_embeddings
from lezero.serve.server.embedding import read_embeddings
from lezero.serve.server.exchange import Exchange, parse
from lezero.serve.server.face import Face, Handler
from lezero.serve.server.lanes import Lanes
from lezero.serve.server.metrics import Metrics
from lezero.serve.server.stats import gauges, stats
from lezero.serve.server.worker import Worker


class LanguageFace(Face):
    """One `LLM`; see the routes in `questions`."""

    def __init__(self, llm: LLM, config: ServeConfig, name: str) -> None:
        self.llm, self.name, self._config = llm, name, config
        self.metrics = Metrics()
        self.answered = self.metrics.answered
        room = llm.engine.scheduler.max_requests + config.queue
        self.worker = Worker(llm, self.metrics, room)

    @property
    def broken(self) -> str | None:
        return self.worker.broken

    def stalled_s(self) -> float:
        return self.worker.stalled_s()

    def rehearse(self) -> None:
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        (answer,) = self.llm.generate([[0]], params)
        if answer.error is not None:
            raise LeZeroError(f"the model does not give even one token: {answer.error}")

    def start(self) -> None:
        self._lanes = Lanes("lezero-encoder")
        self._encoder = Encoder(self.llm, self._lanes)
        self._answerer = Answerer(
            *(self.worker, self._encoder, TokenText(self.llm.coder)),
            *(self.name, self._config.request_s),
        )
        self.worker.start()

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
        config = self._config
        data = parse(await exchange.read(config.body_bytes, config.read_s))
        await self._answerer.answer(exchange, read_asked(form, data, self.name))

    async def _embed(self, exchange: Exchange) -> None:
        config = self._config
        data = parse(await exchange.read(config.body_bytes, config.read_s))
        await answer_embeddings(
            *(exchange, read_embeddings(data, self.name, None)),
            worker=self.worker,
            encoder=self._encoder,
            model=self.name,
            seconds=config.request_s,
        )
