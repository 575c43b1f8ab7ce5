"""Guesses of the next tokens, which the model checks several at a time.

A guess is kept where it is the token that would have been drawn there anyway (chance depends on
the seed and the position alone), so answers are the same tokens with and without speculation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from lezero.serve.request import Request, State


class Speculator(ABC):
    """Sets `drafts` of requests that decode, and hears what came of the step.

    most: guesses of a request in a step at most; 0 where it does not say.
    """

    most: int = 0

    @abstractmethod
    def guess(self, requests: Sequence[Request]) -> None:
        """The engine calls it before each step, with all requests that decode."""

    def checked(self, drawn: int, prompts: bool) -> None:  # noqa: B027 (nothing is fine too)
        """After each step: tokens that were drawn, and whether prompts were fed in it too."""

    def close(self) -> None:  # noqa: B027
        """Lets go of all requests, and of what it holds of them; it is not asked again."""


class PromptLookup(Speculator):
    """Guesses that what followed the last few tokens before follows them again.

    Saxena, 2023, "Prompt Lookup Decoding". drafts: how many tokens a guess has at most. longest,
    shortest: how many of the last tokens must have come before, tried from the longest. Where
    tokens were seen is kept until the request ends, also while it is not asked for: to read a long
    text anew would take longer than many steps.
    """

    def __init__(self, drafts: int = 6, longest: int = 4, shortest: int = 2) -> None:
        self.most, self._longest, self._shortest = drafts, longest, shortest
        self._places: dict[Request, _Places] = {}

    def guess(self, requests: Sequence[Request]) -> None:
        for gone in [one for one in self._places if one.state is State.FINISHED]:
            del self._places[gone]
        for request in requests:
            places = self._places.setdefault(request, _Places(self._longest, self._shortest))
            at = places.last(request.tokens)
            request.drafts = () if at is None else tuple(request.tokens[at : at + self.most])


class _Places:
    """Where each run of tokens was last seen, kept up with a text that grows."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def last(self, tokens: Sequence[int]) -> int | None:
        """The place after the last earlier occurrence of the tokens at the end."""
        for end in range(self._known, len(tokens)):
            for length in self._lengths:
                if end >= length:
                    self._after[tuple(tokens[end - length : end])] = end
        self._known = len(tokens)
        for length in self._lengths:
            if len(tokens) > length:
                found = self._after.get(tuple(tokens[-length:]))
                if found is not None:
                    return found
        return None
