"""An engine without tensors: what a cache would hold is written down and checked at every step."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from lezero.serve import Chunk, Drawn, Request, SamplingParams, Scheduler, Step

VOCABULARY = 5
END = 4


def context(tokens: Sequence[int]) -> bytes:
    """Stands for the keys and values of the last of `tokens`, which depend on all of them."""
    return hashlib.blake2b(bytes(tokens), digest_size=8).digest()


def next_token(tokens: Sequence[int]) -> int:
    """What the model says after `tokens`."""
    return context(tokens)[0] % VOCABULARY


def plain_answer(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """The answer to a prompt that is alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + params.max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == END and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


class PlainEngine:
    """Runs steps of a scheduler; `fed` counts tokens that were fed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.fed = scheduler, 0
        pool = scheduler.pool
        self._cache: list[list[bytes]] = [[b""] * pool.block_size for _ in range(pool.count)]

    def run(self, step: Step) -> list[list[Drawn]]:
        """Writes all chunks, then reads: as a model does, layer by layer."""
        chunks = step.chunks
        assert sum(chunk.count for chunk in chunks) + step.left == self.scheduler.max_tokens
        assert step.left >= 0
        assert len({chunk.request for chunk in chunks}) == len(chunks)
        written: set[tuple[int, int]] = set()
        for chunk in chunks:
            written |= self._write(chunk, written)
        return [self._read(chunk) for chunk in chunks]

    def _write(self, chunk: Chunk, written: set[tuple[int, int]]) -> set[tuple[int, int]]:
        request, size = chunk.request, self.scheduler.pool.block_size
        assert chunk.count > 0
        assert chunk.start == request.computed, "a gap, or tokens fed twice"
        assert len(chunk.tokens) == chunk.count
        tokens = [*request.tokens[: chunk.start], *chunk.tokens]
        places = set()
        for position in range(chunk.start, chunk.end):
            place = request.blocks[position // size], position % size
            assert place not in written, "two requests write to one place"
            places.add(place)
            self._cache[place[0]][place[1]] = context(tokens[: position + 1])
        self.fed += chunk.count
        return places

    def _read(self, chunk: Chunk) -> list[Drawn]:
        request, size = chunk.request, self.scheduler.pool.block_size
        tokens = [*request.tokens[: chunk.start], *chunk.tokens]
        for position in range(chunk.end):
            held = self._cache[request.blocks[position // size]][position % size]
            assert held == context(tokens[: position + 1]), "a block holds other tokens"
        assert chunk.samples == (chunk.known == len(request.tokens))
        draws: list[Drawn] = []
        if chunk.samples:
            for end in range(chunk.known, chunk.end + 1):
                draws.append(Drawn(next_token(tokens[:end])))
                if end == chunk.end or draws[-1].token != tokens[end]:
                    break
        return draws


def guess(request: Request, chance: random.Random) -> list[int]:
    """Drafts, some of them right."""
    tokens = list(request.tokens)
    for _ in range(chance.randrange(7)):
        right = chance.random() < 0.7
        tokens.append(next_token(tokens) if right else chance.randrange(VOCABULARY))
    return tokens[len(request.tokens) :]
