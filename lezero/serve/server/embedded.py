"""The answer to `/v1/embeddings` of a language model."""

from __future__ import annotations

from torch import Tensor

from lezero.core.errors import ConfigError, NumericsError
from lezero.serve.server.answers import busy
from lezero.serve.server.coded import Encoder
from lezero.serve.server.embedder import EngineError
from lezero.serve.server.embedding import Embeddings, told_embeddings
from lezero.serve.server.exchange import Exchange, within
from lezero.serve.server.lanes import Lanes
from lezero.serve.server.problem import Problem, refused
from lezero.serve.server.worker import BusyError, Worker


async def embeddings_body(
    exchange: Exchange,
    asked: Embeddings,
    *,
    worker: Worker,
    encoder: Encoder,
    lanes: Lanes,
    model: str,
    seconds: float,
) -> bytes:
    """The answer's body, for which the place is not needed any more: to read it takes the client's
    time. Raises `Problem`, or `ClientGoneError`, which gives the place up."""
    exchange.expect(asked.answer_bytes(worker.engine.program.dim))
    try:
        worker.reserve(1)
    except BusyError:
        raise busy(worker, 1) from None
    try:
        async with within(seconds):
            found, used = await exchange.unless_gone(_embedded(asked, worker, encoder))
        length = sum(map(len, found))
        return await lanes.write(length, lambda: told_embeddings(found, asked, model, used))
    finally:
        worker.release(1)


async def _embedded(
    asked: Embeddings, worker: Worker, encoder: Encoder
) -> tuple[list[Tensor], int]:
    """The vectors, and how many tokens they are of."""
    try:
        prompts = await encoder.prompts(asked.inputs, asked.truncate)
        return await worker.embed(prompts), sum(map(len, prompts))
    except ConfigError as error:
        raise refused(error) from None
    except EngineError as error:
        if error.ended:
            raise Problem(503, str(error), retry_s=5) from None
        raise Problem(500, str(error), code="engine_error") from None
    except NumericsError as error:
        raise Problem(500, str(error), code="engine_error") from None
