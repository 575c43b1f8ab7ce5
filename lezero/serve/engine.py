"""The loop: plan a step, run it, draw tokens, take them back. One thread, no clock, no network.

[Note: a step that raises] Its chunks are run again in halves, and those in halves, until the
requests that raise are alone. They end with an error; what the others are given is what they would
have got anyway, since chunks of a step do not depend on each other, and feeding tokens again writes
the same keys and values to the same places.

[Note: running ahead] An accelerator that waits for the host between two tokens stands still. Where
all requests of a step take the likeliest token and the program `flies`, the step is launched, and
the next one behind it, fed with tokens that are still on the device; only then are the first one's
tokens read. Who turns out to have ended with the first is in vain in the second: what it wrote lies
behind what it had computed, in blocks that it held then, and whoever gets them writes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lezero.core.log import logger
from lezero.serve.blocks import BlockPool
from lezero.serve.flight import Flight
from lezero.serve.program import Fed, Program
from lezero.serve.request import Request, State
from lezero.serve.sampler import Row, asked_of, draw, no_token
from lezero.serve.sampling import Drawn
from lezero.serve.scheduler import Chunk, Scheduler, Step
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
    """What steps of one call brought: new tokens by request, requests that ended, those that
    raised."""

    tokens: dict[Request, list[int]] = field(default_factory=dict)
    ended: list[Request] = field(default_factory=list)
    failures: dict[Request, Exception] = field(default_factory=dict)
    passes: int = 0
    """Through the model; where there were several, each drew a token for all."""


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
        self.pool = BlockPool.of(program, blocks)
        why = program.why_longest if longest == program.longest else ""
        self.scheduler = Scheduler(
            *(self.pool, program.most_tokens, max_requests, longest),
            most_beside=program.most_beside,
            why_longest=why,
        )
        self._speculator = speculator
        self._flies, self._follows = program.flies, speculator is None
        self._flying: tuple[Step, Flight] | None = None
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

    @property
    def speculator(self) -> Speculator | None:
        """Who guesses; None where nobody does, or where it raised once."""
        return self._speculator

    def works(self) -> bool:
        """Whether the model still takes one token; asked where a step failed, or an embedding. True
        while embeddings hold the whole cache: it cannot be tried then, and the next step that fails
        asks again."""
        self._flying = None  # its requests are fed the same tokens again
        self.scheduler.make_room(1)
        if self.pool.free_count == 0:
            return True
        blocks = self.pool.allocate(1)
        try:
            return bool(self.program.run([Fed([0], 0, blocks, [0])]).isfinite().all())
        except Exception:
            return False
        finally:
            self.pool.release(blocks)

    def step(self) -> Progress:
        """One pass through the model; nothing where there is nothing to do."""
        step, flight = self._flown() or self._planned()
        chunks = step.chunks
        if not chunks:
            return Progress()
        self._flying = None if flight is None else self._ahead(step, flight)
        failures: dict[Request, Exception] = {}
        drafted = sum(len(chunk.drafts) for chunk in chunks)
        followed = self._followed(step) if flight is None else None
        if followed is None:
            results, passes = self._landed(chunks, flight, failures), 1
        else:
            step, results = followed
            chunks, passes = step.chunks, len(results[0])
        lengths = {chunk.request: len(chunk.request.tokens) for chunk in chunks}
        ended = self.scheduler.update(step, results)
        tokens = {r: r.tokens[length:] for r, length in lengths.items() if len(r.tokens) > length}
        totals = self.totals
        totals.steps += passes
        totals.fed += sum(chunk.count for chunk in chunks)
        totals.drawn += sum(map(len, tokens.values()))
        totals.drafted += drafted
        totals.accepted += sum(max(0, len(found) - 1) for found in results) if drafted else 0
        totals.preempted += step.preempts
        if self._speculator is not None:
            prompts = any(chunk.known - chunk.start > 1 for chunk in chunks)
            self._speculator.checked(sum(map(len, tokens.values())), prompts)
        return Progress(tokens, ended, failures, passes)

    def _followed(self, step: Step) -> tuple[Step, list[list[Drawn]]] | None:
        """Several tokens for each chunk, where all have their first and ask for tokens alone, and
        nobody else has his turn: what Python does between two steps is a tenth of a short one. The
        tokens are like drafts that were all right. None: the step is to be run."""
        chunks = step.chunks
        by_chance = not all(chunk.request.greedy for chunk in chunks)
        most = self.program.steps_at_once(len(chunks), by_chance) if self._follows else 1
        if most < 2 or not all(map(_goes_on, chunks)):
            return None
        count = self.scheduler.room_to_follow(step, most)
        if count < 2:
            return None
        fed = [Fed(chunk.tokens, chunk.start, chunk.request.blocks, (0,)) for chunk in chunks]
        try:
            requests = [chunk.request for chunk in chunks]
            asked = asked_of(requests, count, self.program.vocab) if by_chance else None
            found = self.program.follow(fed, count, asked)
        except Exception as error:
            _LOG.error("steps failed; from here on each is run by itself", exc_info=error)
            self._follows = False
            return None
        if -1 in found[-1]:
            for chunk, token in zip(chunks, found.pop(), strict=True):
                chunk.request.follows = token >= 0
        if not found:
            return None
        taken, results = Step(self.scheduler.max_tokens), []
        taken.preempts = step.preempts
        for chunk, tokens in zip(chunks, zip(*found, strict=True), strict=True):
            taken.feed(Chunk(chunk.request, chunk.start, len(tokens), tokens[:-1]))
            results.append([Drawn(token) for token in tokens])
        return taken, results

    def _flown(self) -> tuple[Step, Flight] | None:
        """The step that was launched behind the last one, unless nobody wants it any more."""
        flying, self._flying = self._flying, None
        if flying is None or not any(_is_wanted(chunk) for chunk in flying[0].chunks):
            return None
        return flying

    def _planned(self) -> tuple[Step, Flight | None]:
        """A new step, launched where it can be."""
        self._guess()
        step = self.scheduler.schedule()
        chunks = step.chunks
        if not self._flies or not all(c.count == 1 and c.samples for c in chunks) or not chunks:
            return step, None
        return step, self._launched(step)

    def _ahead(self, step: Step, flight: Flight) -> tuple[Step, Flight] | None:
        """The step behind one that flies, launched; see [Note: running ahead]."""
        following = self.scheduler.ahead(step)
        if following is None:
            return None
        numbers = {chunk.request: number for number, chunk in enumerate(step.chunks)}
        rows = [numbers[chunk.request] for chunk in following.chunks]
        launched = self._launched(following, flight, rows)
        return None if launched is None else (following, launched)

    def _launched(
        self, step: Step, after: Flight | None = None, rows: Sequence[int] = ()
    ) -> Flight | None:
        chunks = step.chunks
        if self._speculator is not None or not all(chunk.request.greedy for chunk in chunks):
            return None
        fed = [
            Fed([0] if after else chunk.tokens, chunk.start, chunk.request.blocks, (0,))
            for chunk in chunks
        ]
        try:
            return self.program.launch(fed, after, rows)
        except Exception as error:
            _LOG.error("a step was not launched; from here on each is waited for", exc_info=error)
            self._flies = False
            return None

    def _landed(
        self, chunks: Sequence[Chunk], flight: Flight | None, failures: dict[Request, Exception]
    ) -> list[list[Drawn]]:
        """What is drawn for each chunk: what the flight brings, or else a run of them."""
        if flight is None:
            return self._run_apart(chunks, failures)
        try:
            found = flight.tokens()
        except Exception as error:
            _LOG.error("a launched step failed; its requests run again", exc_info=error)
            self._flying = None
            left = [chunk for chunk in chunks if _is_wanted(chunk)]
            again = iter(self._run_apart(left, failures) if left else [])
            return [next(again) if _is_wanted(chunk) else [] for chunk in chunks]
        return [
            [Drawn(token, error=None if token >= 0 else no_token(Row.of(chunk.request)))]
            for token, chunk in zip(found, chunks, strict=True)
        ]

    def _guess(self) -> None:
        speculator = self._speculator
        if speculator is None:
            return
        running = self.scheduler.running
        decoding = [request for request in running if request.pending == 1 and request.guessed]
        try:
            speculator.guess(decoding)
        except Exception as error:
            _LOG.error("guessing failed; from here on answers come without", exc_info=error)
            self._speculator = None
            with suppress(Exception):  # what broke may not close either, and is done with anyway
                speculator.close()

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
        fed, asked = [], []
        for chunk in chunks:
            guesses = range(len(chunk.drafts) + 1 if chunk.samples else 0)
            asked += [(chunk.request, chunk.drafts[:count]) for count in guesses]
            wanted = range(chunk.count - len(guesses), chunk.count)
            tokens, prompt = chunk.tokens, max(0, len(chunk.request.prompt) - chunk.start)
            fed.append(Fed(tokens, chunk.start, chunk.request.blocks, wanted, prompt))
        drawn = iter(self._drawn(fed, asked))
        found: list[list[Drawn]] = []
        for chunk in chunks:
            count = len(chunk.drafts) + 1 if chunk.samples else 0
            mine = [next(drawn) for _ in range(count)]
            found.append(mine[: _kept(chunk.drafts, mine)])
        return found

    def _drawn(
        self, fed: Sequence[Fed], asked: Sequence[tuple[Request, Sequence[int]]]
    ) -> list[Drawn]:
        """What is drawn for each wanted row: of a request, behind some of its guesses."""
        if not asked or not all(request.greedy for request, _ in asked):
            return draw(self.program.run(fed), [Row.of(*one) for one in asked])
        return [
            Drawn(token, error=None if token >= 0 else no_token(Row.of(*one)))
            for token, one in zip(self.program.best(fed), asked, strict=True)
        ]


def _kept(drafts: Sequence[int], drawn: Sequence[Drawn]) -> int:
    """Tokens up to the first that is not what its draft guessed, that one included."""
    for index, (draft, found) in enumerate(zip(drafts, drawn, strict=False)):
        if found.token != draft:
            return index + 1
    return len(drawn)


def _goes_on(chunk: Chunk) -> bool:
    """Whether the chunk is the last token of an answer that asks for nothing but tokens."""
    request = chunk.request
    one = chunk.count == 1 and chunk.samples and len(request.tokens) > len(request.prompt)
    return one and request.plain and request.follows


def _is_wanted(chunk: Chunk) -> bool:
    """Whether the request still waits for what the chunk brings."""
    return chunk.request.state is State.RUNNING
