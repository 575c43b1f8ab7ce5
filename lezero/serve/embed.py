"""Embeddings of prompts: the mean of a prompt's final hidden states, with length 1.

The mean over all tokens is what a language model that was never taught to embed does best with.
Models that were taught to, such as Qwen3-Embedding, mostly mean their last token's state, so they
are no better than others here.

[Note: bitwise the same] Prompts are cut at the same places whatever they share a step with, and
each piece is summed alone, so an embedding does not depend on its neighbours. For the same reason
prompts are fed whole: what others left in the cache is not used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lezero.core import device
from lezero.core.errors import ConfigError, NumericsError
from lezero.core.interrupts import let_in
from lezero.serve.engine import Engine
from lezero.serve.program import Fed
from lezero.serve.request import TooLongError


def embed(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """The embedding of each prompt, whose length is that of the hidden states.

    Raises `ConfigError` for a prompt that is empty or never fits, `NumericsError` for states that
    are no numbers.
    """
    going = Passages(engine, prompts)
    try:
        while not going.step():
            let_in()
    finally:
        going.close()
    return [vector.tolist() for vector in going.embeddings()]


class Passages:
    """Prompts that are embedded step by step, between steps of the engine, in whose cache they take
    room: requests that run may be preempted. first: the number that errors give the first prompt.
    waits: not those that were already since they last drew a token; then the engine must step too.

    Raises `ConfigError` for a prompt that is empty or never fits. Close it, or step to the end.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        first: int = 0,
        *,
        waits: bool = False,
    ) -> None:
        check_prompts(engine, prompts)
        self._engine, self._waits = engine, waits
        self._all = [_Passage(number, list(prompt)) for number, prompt in enumerate(prompts, first)]
        self._waiting, self._running = deque(self._all), list[_Passage]()

    def step(self) -> bool:
        """One pass through the model, or none while others hold the room; whether it was the last
        one."""
        engine = self._engine
        _admit(engine, self._waiting, self._running, self._waits)
        if self._running:
            _run(engine, self._running)
            self._running = [x for x in self._running if not _ended(engine, x)]
        return not (self._waiting or self._running)

    def close(self) -> None:
        """Gives the room back at any moment."""
        for passage in self._running:
            self._engine.pool.release(passage.blocks)
        self._running = []

    def embeddings(self) -> list[Tensor]:
        """After the last step: fp32 (D,) each, on the CPU.

        Raises `NumericsError` for states that are no numbers.
        """
        return [passage.embedding() for passage in self._all]


@dataclass(eq=False)
class _Passage:
    """A prompt on its way through the model; sum: of the states so far, fp64."""

    number: int
    tokens: list[int]
    position: int = 0
    blocks: list[int] = field(default_factory=list)
    sum: Tensor | float = 0.0

    def embedding(self) -> Tensor:
        assert isinstance(self.sum, Tensor)
        mean = self.sum / len(self.tokens)
        if not bool(mean.isfinite().all()):
            raise NumericsError(
                f"prompts[{self.number}]: the model's hidden states hold NaN or infinite numbers; "
                "there is no embedding of it"
            )
        return (mean / mean.norm().clamp(min=1e-12)).float().cpu()


def longest_prompt(engine: Engine) -> int:
    """Tokens of a prompt at most: what context and cache have room for."""
    return min(engine.scheduler.longest, engine.pool.count * engine.pool.block_size)


def check_prompts(engine: Engine, prompts: Sequence[Sequence[int]], name: str = "prompts") -> None:
    """Raises `ConfigError` for a prompt that is empty or never fits."""
    most = longest_prompt(engine)
    for number, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= most:
            kind = TooLongError if prompt else ConfigError
            raise kind(
                f"{name}[{number}]: got {len(prompt)} tokens, allowed is 1 to {most}, which "
                "context and cache have room for; cut the text"
            )


def _admit(engine: Engine, waiting: deque[_Passage], running: list[_Passage], waits: bool) -> None:
    """Starts prompts as long as one more step has room; the first one in any case."""
    room = engine.program.most_tokens - sum(len(x.tokens) - x.position for x in running)
    while waiting and (room > 0 or not running):
        passage = waiting[0]
        count = engine.pool.blocks_for(len(passage.tokens))
        if not running:
            engine.scheduler.make_room(count, once=waits)
        if engine.pool.free_count < count:
            return
        passage.blocks = engine.pool.allocate(count)
        room -= len(passage.tokens)
        running.append(waiting.popleft())


def _run(engine: Engine, running: Sequence[_Passage]) -> None:
    """Feeds the next piece of each prompt, as far as a step has room."""
    most = left = engine.program.most_tokens
    fed, passages = list[Fed](), list[_Passage]()
    for passage in running:
        piece = passage.tokens[passage.position : passage.position + most]
        if len(piece) > left:
            break
        count = len(piece)
        fed.append(Fed(piece, passage.position, passage.blocks, range(count), prompt=count))
        passages.append(passage)
        left -= len(piece)
    states_RD = device.with_doubles(engine.program.states(fed))
    pieces = states_RD.split([len(one.tokens) for one in fed])
    for passage, one, piece_ND in zip(passages, fed, pieces, strict=True):
        passage.sum = passage.sum + piece_ND.sum(dim=0, dtype=torch.float64)
        passage.position += len(one.tokens)


def _ended(engine: Engine, passage: _Passage) -> bool:
    if passage.position < len(passage.tokens):
        return False
    engine.pool.release(passage.blocks)
    return True
