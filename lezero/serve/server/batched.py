"""The face of models that answer in one pass, batched by a `Runner`: embeddings and inference."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lezero.core.errors import ConfigError
from lezero.serve.batching.batcher import MOST, Batcher, FullError
from lezero.serve.batching.encoder import TOPIC, SentenceEncoder
from lezero.serve.batching.model import measured
from lezero.serve.batching.module import InferModule
from lezero.serve.batching.plan import Plan
from lezero.serve.batching.runner import FailedError, Runner, StoppedError
from lezero.serve.server.batch_metrics import BatchMetrics
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.embedding import Embeddings, read_embeddings, told_embeddings
from lezero.serve.server.exchange import JSON, Exchange, Value, parse, within
from lezero.serve.server.face import Face, Handler, settle
from lezero.serve.server.host import Host
from lezero.serve.server.inference import (
    TENSORS,
    answer_bytes,
    answer_kind,
    read_inputs,
    told_outputs,
)
from lezero.serve.server.lanes import Lanes
from lezero.serve.server.problem import ClientGoneError, Problem, refused
from lezero.serve.server.record import Record
from lezero.serve.threads import placement_lines

Served = SentenceEncoder | InferModule


class BatchFace(Face):
    """An encoder or a module behind a queue that holds a target of latency.

    Raises `ConfigError` for another `BatchedModel`: HTTP has no questions for it.
    """

    def __init__(
        self,
        model: Served,
        config: ServeConfig,
        name: str,
        plan: Plan | None = None,
        record: Record | None = None,
    ) -> None:
        if not isinstance(model, SentenceEncoder | InferModule):
            kind = type(model).__name__
            problem = f"model: got a {kind}, allowed are SentenceEncoder and InferModule"
            raise ConfigError(f"{problem}; Runner in lezero.serve.batching runs any in a thread")
        self.model, self.name, self._config = model, name, config
        self._plan, self._record = plan, record
        self.answered: Counter[tuple[str, int]] = Counter()
        self.kinds = (JSON, TENSORS) if isinstance(model, InferModule) else (JSON,)
        self.metrics = BatchMetrics(self.answered)

    @property
    def broken(self) -> str | None:
        return self.runner.broken

    def stalled_s(self) -> float:
        return self.runner.stalled_s()

    def lane_s(self) -> float:
        return self._lanes.stalled_s()

    def rehearse(self) -> None:
        """Measures steps of rising size, and looks for the first plan."""
        target_s, plan = self._config.p99_ms / 1000, self._plan
        curve, most = measured(self.model, target_s, most=min(MOST, plan.most if plan else MOST))
        if plan is not None and plan.most > most:
            plan = replace(plan, most=most)
        self.batcher = Batcher(
            curve,
            target_s=target_s,
            waiting=self._config.queue,
            most=most,
            mix=self.model.usual,
            plan=plan,
        )
        self.runner = Runner(self.model, self.batcher, self.metrics.latency_s.add, self._take_plan)
        self._take_plan()

    def _take_plan(self) -> None:
        """Writes the plan down, with what it was chosen from."""
        if self._record is not None:
            usual, batcher = self.model.usual, self.batcher
            self._record.take_plan(
                batcher.plan,
                sum(usual) / len(usual),
                step=self.runner.counts.steps,
                target_s=batcher.target_s,
            )

    def start(self, alone: bool) -> None:
        self._lanes = Lanes("lezero-bodies")
        # a module's own code may start threads and programs, which would inherit one core
        self.runner.start(alone and not isinstance(self.model, InferModule))

    async def stop(self) -> None:
        await asyncio.to_thread(self.runner.stop)
        self._lanes.close()

    def cancel_all(self) -> None:
        self.runner.cancel_all()

    def questions(self) -> Mapping[str, Handler]:
        if isinstance(self.model, SentenceEncoder):
            return {"/v1/embeddings": self._embed}
        return {"/v1/infer": self._infer}

    def described(self) -> dict[str, Any]:
        model = self.model
        if isinstance(model, SentenceEncoder):
            return {"max_model_len": model.longest, "dimensions": model.dim}
        return {"inputs": {name: model.shape_text(name) for name in model.example}}

    def metrics_text(self) -> str:
        return self.metrics.text(self.runner)

    def stats(self) -> dict[str, Any]:
        return {
            "kind": "embeddings" if isinstance(self.model, SentenceEncoder) else "infer",
            "model": self.name,
            "description": self.model.description,
            **self.metrics.stats(self.runner),
        }

    async def _embed(self, exchange: Exchange) -> None:
        await exchange.reply(200, await self._embedded(exchange), JSON)

    async def _embedded(self, exchange: Exchange) -> bytes:
        model = self.model
        assert isinstance(model, SentenceEncoder)
        body = await exchange.read(self._config.body_bytes, self._config.read_s)

        def read() -> tuple[Embeddings, list[list[int]]]:
            asked = read_embeddings(parse(body), self.name, model.dim)
            found = [model.tokens(x) if isinstance(x, str) else list(x) for x in asked.inputs]
            if asked.truncate:
                found = [model.cut(x) for x in found]
            for i, one in enumerate(found):
                model.check(one, f"input[{i}]")
            return asked, found

        async with within(self._config.request_s):
            asked, items = await self._items(exchange, len(body), read)
            exchange.expect(asked.answer_bytes(model.dim))
            vectors = await self._answers(exchange, items)
            used = sum(map(len, items))
            return await self._lanes.write(
                len(vectors) * model.dim, lambda: told_embeddings(vectors, asked, self.name, used)
            )

    async def _infer(self, exchange: Exchange) -> None:
        told, kind = await self._inferred(exchange)
        await exchange.reply(200, told, kind)

    async def _inferred(self, exchange: Exchange) -> tuple[bytes, str]:
        """The body of an answer, and its type."""
        model = self.model
        assert isinstance(model, InferModule)
        kind = exchange.header("content-type").partition(";")[0].strip().lower()
        wanted = answer_kind(exchange.header("accept"), kind)
        body = await exchange.read(self._config.body_bytes, self._config.read_s)
        async with within(self._config.request_s):
            rows, is_single = await self._items(
                exchange, len(body), lambda: read_inputs(body, kind, model, self.name)
            )
            answers = await self._answers(exchange, rows)
            exchange.expect(answer_bytes(answers, wanted))
            count = sum(x.numel() for row in answers for x in row.values())
            told = await self._lanes.write(count, lambda: told_outputs(answers, is_single, wanted))
        return told, wanted

    async def _items(self, exchange: Exchange, length: int, work: Callable[[], Value]) -> Value:
        """What `work` makes of a body of so many bytes; as many bodies wait for it as requests."""
        lane = self._lanes.of(length)
        lane.refuse_beyond(self._config.queue)
        try:
            return await exchange.unless_gone(lane.run(work))
        except ConfigError as error:
            raise refused(error) from None

    async def _answers(self, exchange: Exchange, items: Sequence[Any]) -> list[Any]:
        """The answers to all items, or a `Problem`. A client that leaves gives up its place."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Any]] = loop.create_future()

        def told(outcome: Sequence[Any] | Exception) -> None:
            found = outcome if isinstance(outcome, Exception) else list(outcome)
            loop.call_soon_threadsafe(settle, future, found)

        with _problems():
            ask = self.runner.submit(items, told)
            leaving = asyncio.ensure_future(exchange.gone())
            leaving.add_done_callback(lambda _: settle(future, ClientGoneError()))
            try:
                return await future
            finally:
                leaving.cancel()
                self.runner.cancel(ask)


@contextmanager
def _problems() -> Iterator[None]:
    """What a client is told when the runner does not answer."""
    try:
        yield
    except FullError as error:
        retry_s = max(1, min(60, round(error.retry_s)))
        text = f"too busy: {error.reason}; try again later"
        raise Problem(429, text, code="queue_full", retry_s=retry_s) from None
    except FailedError as error:
        raise Problem(500, str(error), code="model_error") from None
    except StoppedError as error:
        raise Problem(503, str(error), retry_s=5) from None


class BatchServer(Host):
    """One batched model at one address; see `Host`. plan: a batch and delay that are kept, instead
    of those that are found. record: where what is chosen is written down."""

    def __init__(
        self,
        model: Served,
        config: ServeConfig | None = None,
        name: str = "model",
        plan: Plan | None = None,
        record: Record | None = None,
    ) -> None:
        config = config or ServeConfig()
        self.record = record
        self.batches = BatchFace(model, config, config.name or name, plan, record)
        super().__init__(self.batches, config)


def serve_batched(server: BatchServer, say: Callable[[str], None] = print) -> None:
    """What `lz serve` does: tells the forecast and the address, serves, and tells what was."""
    face, model = server.batches, server.batches.model
    say(f"model       {server.name}: {model.description}")
    if isinstance(model, SentenceEncoder):
        decision = model.decisions.records[TOPIC]
        figures = [f"{n} {_shown(f)}" for n, f in decision.candidates.items()]
        why = f" ({'; '.join(figures)})" if figures else ""
        say(f"weights     {decision.chosen}: {decision.reason}{why}")

    def ready(server: BatchServer) -> None:
        for line in [*face.metrics.forecast(face.runner), *placement_lines(face.runner.placement)]:
            say(line)
        if server.record is not None:
            server.record.take_placement(face.runner.placement)
            say(f"why         lz why {server.record.folder}")
        path = next(iter(face.questions()))
        say(f"serving     {server.url} (page), {server.url}{path}")

    server.run(ready, alone=True)
    for line in face.metrics.ended(face.runner):
        say(line)


def _shown(figures: Mapping[str, Any]) -> str:
    seconds = figures.get("s")
    return str(figures.get("failed")) if seconds is None else f"{1000 * seconds:.1f} ms"
