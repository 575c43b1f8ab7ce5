"""The answer to `/v1/embeddings` of a language model."""

from __future__ import annotations

import asyncio

import torch

from lezero.core.errors import ConfigError, NumericsError
from lezero.serve.server.coded import Encoder
from lezero.serve.server.embedder import EngineError
from lezero.serve.server.embedding import Embeddings, told_embeddings
from lezero.serve.server.exchange import Exchange
from lezero.serve.server.problem import ClientGoneError, Problem, refused
from lezero.serve.server.worker import BusyError, Worker


async def answer_embeddings(
    exchange: Exchange,
    asked: Embeddings,
    *,
    worker: Worker,
    encoder: Encoder,
    model: str,
    seconds: float,
) -> None:
    """Answers, or raises `Problem`, or `ClientGoneError`, which gives the place up."""
    try:
        prompts = await encoder.prompts(asked.inputs, asked.truncate)
    except ConfigError as error:
        raise refused(error) from None
    work = asyncio.ensure_future(worker.embed(prompts))
    leaving = asyncio.ensure_future(exchange.gone())
    try:
        async with asyncio.timeout(seconds):
            await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGoneError
        vectors = [torch.tensor(vector) for vector in await work]
    except TimeoutError:
        raise Problem(504, f"not ended within {seconds:g} s") from None
    except BusyError:
        problem = f"the server has {worker.active} requests, as many as it takes; try again later"
        raise Problem(429, problem, code="queue_full", retry_s=worker.wait_s()) from None
    except EngineError as error:
        if error.ended:
            raise Problem(503, str(error), retry_s=5) from None
        raise Problem(500, str(error), code="engine_error") from None
    except NumericsError as error:
        raise Problem(500, str(error), code="engine_error") from None
    finally:
        leaving.cancel()
        work.cancel()
    used = sum(map(len, prompts))
    await exchange.reply_json(200, told_embeddings(vectors, asked, model, used))
