"""What a request asks of its tokens, and what is known of a token that was drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import ConfigDict, Field, field_validator

from lezero.core.config import Config

LEAST, MOST = 0.01, 100.0
"""Bounds of a repetition penalty."""
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0)]


class SamplingParams(Config):
    """How the tokens of one request are chosen, and when it ends.

    The order is: penalties on the logits, temperature, top-k, top-p, min-p (as in transformers).
    A number is no text of one, and 1 is not true; numpy's and torch's are what they hold.
    """

    model_config = ConfigDict(strict=True)

    max_tokens: int = Field(default=128, ge=1)
    """New tokens at most. Where it is not given, fewer if context or cache end before."""
    temperature: float = Field(default=1.0, ge=0.0)
    """Divides the logits; 0 takes the most likely token (greedy)."""
    top_k: int | None = Field(default=None, ge=1)
    """Choose among this many most likely tokens; none: all."""
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    """Choose among the fewest most likely tokens that together reach this probability."""
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    """Choose among tokens at least this many times as likely as the most likely one."""
    repetition_penalty: float | None = Field(default=None, ge=LEAST, le=MOST)
    """For tokens of prompt and answer: logits above 0 are divided by it, others multiplied. None:
    what the model's folder says (generation_config.json), or else 1, which changes nothing."""
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Taken from the logit of each token that is in the answer."""
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Taken from the logit of a token once for each time that it is in the answer."""
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Equal seeds give equal tokens. None: the request's place among those of its `LLM` decides, so
    that a program that asks the same in the same order is answered the same again; no seed that can
    be given has the same chance. The server draws one."""
    stop: tuple[StopString, ...] = Field(default=(), max_length=16, strict=False)
    """The text ends before the one of these that is complete first: "abcd" and "bc" leave "a" of
    "abcd". One that is a special token's name, as <|im_end|>, ends it at that token; else special
    tokens, which leave nothing in a text, count for nothing."""
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=256, strict=False)
    """Tokens that end the answer, besides the model's own."""
    ignore_eos: bool = False
    """Go on after the model's own end tokens."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """Log-probabilities of each token and of this many most likely ones; 0: of the token alone.

    They are those of the model: before penalties, temperature and filters.
    """

    @field_validator("stop", "stop_token_ids", mode="before")
    @classmethod
    def _one_or_none_is_enough(cls, value: Any) -> Any:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        value = _held(value)
        return [_held(x) for x in value] if isinstance(value, list | tuple | set) else value

    @property
    def penalizes(self) -> bool:
        """Whether the choice depends on which tokens came before."""
        repetition = 1 if self.repetition_penalty is None else self.repetition_penalty
        return (repetition, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def _held(value: Any) -> Any:
    """What an array or a scalar of numpy or torch holds; anything else as it is."""
    return value.tolist() if hasattr(value, "dtype") and hasattr(value, "tolist") else value


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a token, and the likeliest tokens with theirs, best first."""

    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token from one row of logits; with `error`, no token could be drawn (`token` is -1).

    sound: with an error, whether the model's own logits were numbers all the same.
    """

    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    sound: bool = False
