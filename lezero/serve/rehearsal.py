"""A short run before the first client is let in: kernels are built, memory is touched, and what
steps take here is seen.

A ceiling (see `forecast.py`) knows the machine's memory and products, and nothing of what a step
takes besides, which with a small model is most of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from lezero.core.errors import LeZeroError
from lezero.core.log import logger
from lezero.serve.engine import Engine
from lezero.serve.request import Request
from lezero.serve.sampling import SamplingParams

_LOG = logger("serve")
_PROMPTS = (16, 64, 256)
"""Tokens of prompts, each tried where the last one was quick."""
_FILLED = 64
"""Tokens of a prompt that shows what long ones reach."""
_ANSWER, _WARM = 49, 8
_LEAST_STEPS = 3
"""Of an answer: its prompt, a step that may be slower than others, and one that counts."""
_QUICK_S, _ANSWER_S = 0.5, 0.5
"""A prompt that took longer is the last one; an answer is cut short after so long."""
_LIKELIEST = SamplingParams(max_tokens=1, temperature=0, repetition_penalty=1.0)
_CHANCE = _LIKELIEST.model_copy(update={"temperature": 1.0, "seed": 0})
"""What OpenAI's protocol asks for unless told otherwise."""


@dataclass
class Pace:
    """Tokens and seconds of steps of one sort."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    @property
    def speed(self) -> float | None:
        """Tokens a second; None where there were none."""
        return self.tokens / self.seconds if self.tokens else None


@dataclass
class Paces:
    """What steps took. alone: of one request that takes the likeliest tokens, without guesses;
    drawn: of one whose tokens chance alone decides; guessing: of one with guesses; filling: of
    prompts.
    """

    alone: Pace = field(default_factory=Pace)
    drawn: Pace = field(default_factory=Pace)
    guessing: Pace = field(default_factory=Pace)
    filling: Pace = field(default_factory=Pace)


def rehearse(engine: Engine, room: int) -> Paces:
    """Runs a request after another through the engine: some seconds, where a step takes one.

    room: tokens of a request at most. Raises `LeZeroError` where the model gives not even one
    token; where later ones are none, that is told, and what was seen before counts.
    """
    scheduler, seen = engine.scheduler, Paces()
    arrivals = scheduler.arrivals
    try:
        error = _try_all(engine, room, seen)
    finally:
        scheduler.arrivals = arrivals  # what clients draw without a seed does not depend on this
    if error is not None:
        _LOG.warning("an answer that was tried before clients are let in broke off: %s", error)
    return seen


def _try_all(engine: Engine, room: int, seen: Paces) -> str | None:
    """Fills `seen`, as far as the model gives tokens; says why it did not."""
    warm, _, error = _tried(engine, room, 1, _CHANCE, _WARM)  # builds, too
    if error is not None and not warm.tokens:
        raise LeZeroError(f"the model does not give even one token: {error}")
    for params, name in ((_LIKELIEST, "alone"), (_CHANCE, "drawn")):
        if error is None:
            _, pace, error = _tried(engine, room, 1, params, _ANSWER)
            setattr(seen, name, pace)
    took = 0.0
    for length in _PROMPTS:
        if error is not None or length >= room or took > _QUICK_S:
            break
        pace, _, error = _tried(engine, room, length, _LIKELIEST, 1)
        took = pace.seconds
        if length >= _FILLED and error is None:
            seen.filling = pace
    return error


def _tried(
    engine: Engine, room: int, length: int, params: SamplingParams, answer: int
) -> tuple[Pace, Pace, str | None]:
    """The paces of a prompt and of its answer, and what is wrong with one of its tokens. The answer
    is cut short where it takes long."""
    asked = params.model_copy(update={"max_tokens": max(1, min(answer, room - length))})
    salt = f"rehearsal {length}"
    request = Request("rehearsal", [0] * length, asked, salt=salt, guessed=False)
    filling, decoding, steps = Pace(), Pace(), 0
    until = time.perf_counter() + _ANSWER_S
    engine.add(request)
    try:
        while request.reason is None and (steps < _LEAST_STEPS or time.perf_counter() < until):
            had, began = len(request.answer), time.perf_counter()
            engine.step()
            took, new = time.perf_counter() - began, len(request.answer) - had
            if had == 0:
                filling.add(length * new, took)
            elif steps > 1 and request.error is None:
                decoding.add(new, took)
            steps += 1
    finally:
        engine.cancel(request)
    return filling, decoding, request.error
