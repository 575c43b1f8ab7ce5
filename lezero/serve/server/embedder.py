"""Prompts that are embedded between two steps of the engine, a few at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lezero.serve.embed import embed
from lezero.serve.engine import Engine

Outcome = list[list[float]] | Exception


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
    vectors: list[list[float]] = field(default_factory=list)


class Embedder:
    """Works in the engine's thread. Clients take turns, and so do they and answers that run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[Embedding] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def add(self, asked: Embedding) -> None:
        self._waiting.append(asked)

    def drop(self, asked: Embedding) -> None:
        """Forgets what nobody waits for any more."""
        if asked in self._waiting:
            self._waiting.remove(asked)

    def end(self, error: Exception) -> None:
        """Tells all that wait that there will be nothing."""
        while self._waiting:
            self._waiting.popleft().told(error)

    def step(self) -> Exception | None:
        """Embeds as many prompts of the first client as fit a step, at least one; what the engine
        raised, if it did."""
        asked = self._waiting.popleft()
        prompts: list[Sequence[int]] = []
        done, room = len(asked.vectors), self._engine.program.most_tokens
        for prompt in asked.prompts[done:]:
            room -= len(prompt)
            if prompts and room < 0:
                break
            prompts.append(prompt)
        try:
            asked.vectors += embed(self._engine, prompts, done)
        except Exception as error:
            asked.told(error)
            return error
        if len(asked.vectors) < len(asked.prompts):
            self._waiting.append(asked)
        else:
            asked.told(asked.vectors)
        return None
