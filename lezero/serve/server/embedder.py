"""Prompts that are embedded between steps of the engine, one pass through the model at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lezero.serve.embed import Passages
from lezero.serve.engine import Engine
from lezero.serve.server.metrics import Metrics

Outcome = list[Tensor] | Exception


class EngineError(Exception):
    """Why there are no embeddings; the text is for clients. ended: the server shuts down."""

    def __init__(self, text: str, ended: bool = False) -> None:
        super().__init__(text)
        self.ended = ended


@dataclass(eq=False)
class Embedding:
    """Prompts of one client, the vectors so far, and who hears of them."""

    prompts: Sequence[Sequence[int]]
    told: Callable[[Outcome], None]
    vectors: list[Tensor] = field(default_factory=list)
    going: Passages | None = None
    """The next few of them, on their way."""
    begun: bool = False


class Embedder:
    """Works in the engine's thread. Clients take turns, and so do they and answers that run: one
    that gave its room to a text draws a token before the next text takes it."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._waiting: deque[Embedding] = deque()
        self.running = 0
        """Clients whose texts have begun and not ended."""

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def add(self, asked: Embedding) -> None:
        self._waiting.append(asked)

    def drop(self, asked: Embedding) -> None:
        """Forgets what nobody waits for any more."""
        if asked in self._waiting:
            self._waiting.remove(asked)
            self._close(asked)

    def end(self, error: Exception) -> None:
        """Tells all that wait that there will be nothing."""
        while self._waiting:
            asked = self._waiting.popleft()
            self._close(asked)
            asked.told(error)

    def step(self) -> Exception | None:
        """One pass for the client whose turn it is; what the engine raised, if it did."""
        asked = self._waiting.popleft()
        if not asked.begun:
            self.running += 1
            self._metrics.tokens_embedded += sum(map(len, asked.prompts))
        asked.begun = True
        try:
            ended = self._advance(asked)
        except Exception as error:
            self._close(asked)
            asked.told(error)
            return error
        if ended:
            self._close(asked)
            asked.told(asked.vectors)
        else:
            self._waiting.append(asked)
        return None

    def _advance(self, asked: Embedding) -> bool:
        """One pass with as many prompts as fit a step, at least one; whether all are done."""
        done = len(asked.vectors)
        if asked.going is None:
            some = self._next(asked.prompts[done:])
            asked.going = Passages(self._engine, some, done, waits=True)
        if not asked.going.step():
            return False
        asked.vectors += asked.going.embeddings()
        asked.going = None
        return len(asked.vectors) == len(asked.prompts)

    def _close(self, asked: Embedding) -> None:
        self.running -= asked.begun
        asked.begun = False
        if asked.going is not None:
            asked.going.close()

    def _next(self, left: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        room, count = self._engine.program.most_tokens, 0
        for prompt in left:
            room -= len(prompt)
            if count and room < 0:
                break
            count += 1
        return left[:count]
