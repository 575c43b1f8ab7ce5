"""The loop: plan a step, run it, draw tokens, take them back. One thread, no clock, no network.

[Note: a step that raises] Its chunks are run again in halves, and those in halves, until the
requests that raise are alone. They end with an error; what the others are given is what they would
have got anyway, since chunks of a step do not depend on each other, and feeding tokens again writes
the same keys and values to the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lezero.core.log import logger
from lezero.serve.blocks import BlockPool
from lezero.serve.program import Fed, Program
from lezero.serve.request import Request
from lezero.serve.sampler import Row, draw
from lezero.serve.sampling import Drawn
from lezero.serve.scheduler import Chunk, Scheduler
from lezero.serve.speculate import Speculator

_LOG = logger("serve")
_FAILED = "the engine failed while it ran this request"


@dataclass
class Totals:
    """What an engine did so far."""

    steps: int = 0
    fed: int = 0
    drawn: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0


@dataclass(frozen=True)
class Progress:
    """What a step brought: new tokens by request, requests that ended, those that raised."""

    tokens: dict[Request, list[int]] = field(default_factory=dict)
    ended: list[Request] = field(default_factory=list)
    failures: dict[Request, Exception] = field(default_factory=dict)


class Engine:
    """Runs requests over one program. `add`, `cancel` and `step` are called by one thread."""

    def __init__(
        self,
        program: Program,
        *,
        blocks: int,
        max_requests: int,
        longest: int,
        speculator: Speculator | None = None,
    ) -> None:
        self.program, self.totals = program, Totals()
        self.pool = BlockPool(blocks, program.block_size, program.shares)
        self.scheduler = Scheduler(self.pool, program.most_tokens, max_requests, longest)
        self._speculator = speculator
        program.reserve(blocks)

    def add(self, request: Request) -> None:
        """Lets a request wait for its turn. What could never run is a `ConfigError`."""
        self.scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """Ends a request at any moment; its blocks are free at once."""
        self.scheduler.cancel(request)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> Progress:
        """One pass through the model; nothing where there is nothing to do."""
        self._guess()
        step = self.scheduler.schedule()
        chunks = step.chunks
        if not chunks:
            return Progress()
        failures: dict[Request, Exception] = {}
        results = self._run_apart(chunks, failures)
        lengths = {chunk.request: len(chunk.request.tokens) for chunk in chunks}
        ended = self.scheduler.update(step, results)
        tokens = {r: r.tokens[length:] for r, length in lengths.items() if len(r.tokens) > length}
        totals = self.totals
        totals.steps += 1
        totals.fed += sum(chunk.count for chunk in chunks)
        totals.drawn += sum(map(len, tokens.values()))
        totals.drafted += sum(len(chunk.drafts) for chunk in chunks)
        totals.accepted += sum(max(0, len(found) - 1) for found in results)
        totals.preempted += step.preempts
        if self._speculator is not None:
            prompts = any(chunk.known - chunk.start > 1 for chunk in chunks)
            self._speculator.checked(sum(map(len, tokens.values())), prompts)
        return Progress(tokens, ended, failures)

    def _guess(self) -> None:
        if self._speculator is None:
            return
        decoding = [request for request in self.scheduler.running if request.pending == 1]
        try:
            self._speculator.guess(decoding)
        except Exception as error:
            _LOG.error("guessing failed; from here on answers come without", exc_info=error)
            self._speculator = None

    def _run_apart(
        self, chunks: Sequence[Chunk], failures: dict[Request, Exception]
    ) -> list[list[Drawn]]:
        """What `_run` gives, with an error for each request that raises even when it is alone."""
        try:
            return self._run(chunks)
        except Exception as error:
            if len(chunks) == 1:
                request = chunks[0].request
                _LOG.error("a step of the engine failed for %s", request.id, exc_info=error)
                failures[request] = error
                return [[Drawn(-1, error=_FAILED)]]
        half = len(chunks) // 2
        return [
            *self._run_apart(chunks[:half], failures),
            *self._run_apart(chunks[half:], failures),
        ]

    def _run(self, chunks: Sequence[Chunk]) -> list[list[Drawn]]:
        """What is drawn for each chunk: the accepted drafts, then one more."""
        fed, rows = [], []
        for chunk in chunks:
            guesses = range(len(chunk.drafts) + 1 if chunk.samples else 0)
            rows += [Row.of(chunk.request, chunk.drafts[:count]) for count in guesses]
            wanted = range(chunk.count - len(guesses), chunk.count)
            fed.append(Fed(chunk.tokens, chunk.start, chunk.request.blocks, wanted))
        drawn = iter(draw(self.program.run(fed), rows))
        found: list[list[Drawn]] = []
        for chunk in chunks:
            count = len(chunk.drafts) + 1 if chunk.samples else 0
            mine = [next(drawn) for _ in range(count)]
            found.append(mine[: _kept(chunk.drafts, mine)])
        return found


def _kept(drafts: Sequence[int], drawn: Sequence[Drawn]) -> int:
    """Tokens up to the first that is not what its draft guessed, that one included."""
    for index, (draft, found) in enumerate(zip(drafts, drawn, strict=False)):
        if found.token != draft:
            return index + 1
    return len(drawn)
