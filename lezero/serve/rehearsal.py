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
_PROMPTS = (1, 16, 64, 256)
"""Tokens of the prompts; the longest that ran counts."""
_ANSWER = 49
_LEAST_STEPS = 3
"""Of a request: its prompt, a step that may be slower than others, and one that counts."""
_MOST_S = 1.0
"""After so long no longer prompt is begun; after half as long an answer is cut short."""
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
    drawn: of one whose tokens chance decides; guessing: of one with guesses; filling: of prompts.
    """

    alone: Pace = field(default_factory=Pace)
    drawn: Pace = field(default_factory=Pace)
    guessing: Pace = field(default_factory=Pace)
    filling: Pace = field(default_factory=Pace)


def rehearse(engine: Engine, room: int) -> Paces:
    """Runs a request after another through the engine, with prompts that grow while that is quick.

    room: tokens of a request at most. Raises `LeZeroError` where the model gives not even one
    token, or breaks off; later it is told, and what was seen before counts.
    """
    _, _, error = _tried(engine, room, 1, _CHANCE)  # builds and warms
    if error is not None:
        raise LeZeroError(f"the model does not give even one token: {error}")
    began, seen = time.perf_counter(), Paces()
    for length, params in (*((length, _LIKELIEST) for length in _PROMPTS), (1, _CHANCE)):
        if length > 1 and (length + _LEAST_STEPS > room or time.perf_counter() > began + _MOST_S):
            continue
        filling, decoding, error = _tried(engine, room, length, params)
        if error is not None:
            _LOG.warning("an answer that was tried before clients are let in broke off: %s", error)
            break
        if params is _CHANCE:
            seen.drawn = decoding
        else:
            seen.filling, seen.alone = filling, decoding
    return seen


def _tried(
    engine: Engine, room: int, length: int, params: SamplingParams
) -> tuple[Pace, Pace, str | None]:
    """The paces of a prompt and of its answer, and what is wrong with one of its tokens. The answer
    is cut short where it takes long."""
    asked = params.model_copy(update={"max_tokens": max(1, min(_ANSWER, room - length))})
    salt = f"rehearsal {length}"
    request = Request("rehearsal", [0] * length, asked, salt=salt, guessed=False)
    filling, decoding, steps = Pace(), Pace(), 0
    until = time.perf_counter() + _MOST_S / 2
    engine.add(request)
    try:
        while request.reason is None and (steps < _LEAST_STEPS or time.perf_counter() < until):
            had, began = len(request.answer), time.perf_counter()
            engine.step()
            took, new = time.perf_counter() - began, len(request.answer) - had
            if had == 0:
                filling.add(length * new, took)
            elif steps > 1:
                decoding.add(new, took)
            steps += 1
    finally:
        engine.cancel(request)
    return filling, decoding, request.error
