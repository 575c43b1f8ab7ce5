"""One request on its way from prompt to answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from lezero.core.errors import ConfigError
from lezero.serve.sampling import Drawn, SamplingParams, TokenLogprob

Reason = Literal["stop", "length", "cancelled", "error"]
_BEYOND = 1 << 64


class TooLongError(ConfigError):
    """A prompt that never fits, by itself or with the answer that is asked for."""


class State(Enum):
    """Where a request is: it may go from RUNNING back to WAITING when it is preempted."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """Tokens, where their keys and values lie, and how it ended.

    The first fields are the caller's; the rest belong to the scheduler, except `drafts`, which
    whoever speculates sets between two steps.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Lower goes first, like nice."""
    end_tokens: frozenset[int] = frozenset()
    """The model's own tokens that end a text."""
    sample: int = 0
    """Tells apart answers to one prompt with one seed."""
    salt: str = ""
    """Requests share blocks only with those of equal salt."""
    called: str = "prompt"
    """What errors call its prompt."""
    guessed: bool = True
    """Whether its next tokens may be guessed, where the engine does that."""

    plain: bool = field(init=False)
    """Nothing but tokens is asked of it, by no rule that looks at tokens before."""
    greedy: bool = field(init=False)
    """Its tokens are the most likely ones, and nothing else is asked of them."""
    number: int = -1
    """Arrival number, given by the scheduler."""
    state: State = State.WAITING
    tokens: list[int] = field(init=False)
    """Prompt and answer, in a row."""
    computed: int = 0
    """How many of `tokens` have keys and values in the cache."""
    blocks: list[int] = field(default_factory=list)
    """Block i holds the keys and values of tokens i * block size and on."""
    names: list[bytes] = field(default_factory=list)
    """Chain hashes of the full blocks of `tokens`, as far as they were asked for."""
    published: int = 0
    """How many of `blocks` are known to the pool by name, or need not be."""
    drafts: Sequence[int] = ()
    """Guesses of the next tokens, to be fed with the last one."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached: int = 0
    """Tokens of the prompt that were found in the cache when it first ran."""
    preemptions: int = 0
    follows: bool = True
    """Whether several tokens may be drawn in one call; not where its logits were not finite."""
    made_room: bool = False
    """It was preempted for embeddings since it last drew a token."""
    reason: Reason | None = None
    error: str | None = None
    arrived_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        asked = self.params
        self.plain = asked.logprobs is None and not asked.penalizes
        self.greedy = self.plain and asked.temperature == 0
        self._last = len(self.prompt) + asked.max_tokens
        self._ends = frozenset(asked.stop_token_ids)
        if not asked.ignore_eos:
            self._ends |= self.end_tokens

    @property
    def answer(self) -> list[int]:
        """The generated tokens; a token that ended the answer is the last of them."""
        return self.tokens[len(self.prompt) :]

    @property
    def text_ends(self) -> frozenset[int]:
        """Tokens that leave nothing in the text where the answer ends with one of them: the
        model's own, and those asked for."""
        return self.end_tokens.union(self.params.stop_token_ids)

    @property
    def turn(self) -> tuple[int, int]:
        """The lowest goes first."""
        return self.priority, self.number

    @property
    def seed(self) -> int:
        """The one that was asked for; else one of its own, above all that can be asked for."""
        return _BEYOND + self.number if self.params.seed is None else self.params.seed

    @property
    def pending(self) -> int:
        """Tokens that must be fed before the next one can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def wanted(self) -> int:
        """New tokens that it may still get."""
        return self._last - len(self.tokens)

    def take(self, drawn: Drawn) -> Reason | None:
        """Appends a token; says why the answer ends with it, if it does."""
        self.tokens.append(drawn.token)
        if drawn.logprob is not None:
            self.logprobs.append(drawn.logprob)
        if drawn.token in self._ends:
            return "stop"
        return "length" if self.wanted == 0 else None
