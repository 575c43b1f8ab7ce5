"""The text of an answer as its tokens come, whole and in pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Self

from lezero.core.interrupts import held_interrupts
from lezero.data.detokenizer import Detokenizer
from lezero.serve.coder import Coder
from lezero.serve.request import Reason, Request
from lezero.serve.sampling import TokenLogprob
from lezero.serve.scheduler import Scheduler
from lezero.serve.stop_strings import StopStrings


@dataclass(frozen=True)
class Completion:
    """An answer. reason: "stop", "length", "cancelled" or "error" (then `error` says why).

    tokens: all that were drawn, those of a stop string too, which `text` leaves out; logprobs: one
    for each of them. cached_tokens: of the prompt, found in the cache. first_token_s: from arrival
    to it.
    """

    text: str
    tokens: list[int]
    reason: Reason | None
    prompt_tokens: int
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    first_token_s: float | None = None


@dataclass(frozen=True)
class Piece:
    """Text that is certain now, and the tokens that came with it; the last one has the reason."""

    text: str
    tokens: list[int]
    reason: Reason | None = None
    error: str | None = None
    """What went wrong, where the reason is "error"."""


@dataclass(frozen=True, slots=True)
class Named:
    """A token of the text and what is known of it. place: characters of the text before it. lost:
    characters that a stop string took from its end."""

    token: int
    logprob: TokenLogprob
    place: int
    lost: int = 0


class Answer:
    """The text of a request, as its tokens come. Decoded when it is asked for, unless a stop string
    must be looked for, or the place of each token in the text is wanted.

    places: whether it is.
    """

    def __init__(self, request: Request, coder: Coder | None, *, places: bool = False) -> None:
        self.request, self._wants_places = request, places
        self._places: list[int] = []
        """Of each token: characters of the text before it, those too that are held back."""
        self._named = 0
        """Tokens that `named` gave, or left out."""
        self._known, self._pending, self._decoded = "", list[int](), 0
        self._ends = request.text_ends
        self._stops = StopStrings(request.params.stop)
        self._text: Detokenizer | None = None
        self._failed: str | None = None
        """Why there is no more text: a tokenizer may raise for tokens that only the model has."""
        if coder is not None:
            try:
                self._text = Detokenizer(coder.decode, request.prompt)
            except Exception as error:
                self._give_up(error)

    def take(self, tokens: Sequence[int], scheduler: Scheduler) -> Sequence[int]:
        """Takes new tokens and gives those that belong to the answer: up to a stop string, which
        ends the request. So does a text that cannot be decoded, with an error."""
        for number, token in enumerate(tokens, 1):
            if self._wants_places:
                self._found()
                self._places.append(self._decoded)
            last = token == self.request.tokens[-1] and self.request.reason == "stop"
            if self._text is not None and not (last and token in self._ends):
                self._pending.append(token)
            if self.request.params.stop and self._found():
                scheduler.stop(self.request, beyond=len(tokens) - number)
                return tokens[:number]
        if self._failed is not None:
            scheduler.finish(self.request, "error", self._failed, sound=True)
        return tokens

    @property
    def text(self) -> str:
        """What is certain of it."""
        self._found()
        return self._known

    def named(self) -> list[Named]:
        """Tokens that were not given before and whose text is certain, with their
        log-probabilities: their names together are the text. Left out is what a stop string cut
        off, and a token that ends the answer. Asked for places, and after `completion` where the
        request has ended."""
        self._found()
        request, found = self.request, list[Named]()
        first, cut = len(request.prompt), self._cut()
        for number in range(self._named, min(len(self._places), len(request.logprobs))):
            token, place, end = request.tokens[first + number], *self._span(number)
            if request.reason is None and not self._is_certain(place, end):
                return found
            self._named = number + 1
            if place < cut and not self._is_end(number, token):
                lost = end - int(min(cut, end))
                found.append(Named(token, request.logprobs[number], place, lost))
        return found

    def _cut(self) -> float:
        """Characters after which a stop string begins."""
        return math.inf if self._stops.found is None else len(self._known)

    def _span(self, number: int) -> tuple[int, int]:
        """Where the text of a token begins and ends."""
        last = number + 1 == len(self._places)
        return self._places[number], self._decoded if last else self._places[number + 1]

    def _is_certain(self, place: int, end: int) -> bool:
        """Whether no stop string can take any of it. Half a character, and a special token, go with
        the character behind them."""
        return not self.request.params.stop or max(end, place + 1) <= len(self._known)

    def _is_end(self, number: int, token: int) -> bool:
        request = self.request
        last = number + 1 == len(request.tokens) - len(request.prompt)
        return last and request.reason == "stop" and token in self._ends

    def _found(self, *, ended: bool = False) -> bool:
        """Decodes what came, and gives what was held back of it where no more comes; whether a stop
        string ended it."""
        try:
            if self._text is not None:
                for token in self._pending:
                    piece = self._text.add(token)
                    self._decoded += len(piece)
                    self._known += self._stops.add(piece)
                if ended and self._stops.found is None:
                    self._known += self._stops.add(self._text.finish())
                    self._known += self._stops.finish()
        except Exception as error:
            self._give_up(error)
        self._pending.clear()
        return self._stops.found is not None

    def _give_up(self, error: Exception) -> None:
        self._text = None
        self._failed = f"its tokens could not be decoded: {type(error).__name__}: {error}"

    def completion(self) -> Completion:
        """The whole answer, once the request has ended; an error where it cannot be decoded."""
        request = self.request
        if self._found(ended=True) and request.reason in ("length", "error"):
            # Half a character behind the stop string held it back.
            request.reason, request.error = "stop", None
        if self._failed is not None:
            request.reason, request.error = "error", self._failed
        first = request.first_token_s
        return Completion(
            *(self.text, request.answer, request.reason, len(request.prompt), request.cached),
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            error=request.error,
            first_token_s=None if first is None else first - (request.arrived_s or 0.0),
        )


class Stream(Iterator[Piece]):
    """Pieces of an answer. alone: within it no other thread runs a step and takes its text.
    advance: runs a step for all requests. end: cancels this one, and may be called at any moment.

    Closing it, or letting go of it, cancels the request, whether a piece was asked for or not.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        alone: Callable[[], AbstractContextManager[None]],
        advance: Callable[[], None],
        end: Callable[[Answer], None],
    ) -> None:
        self._answer, self._alone = answer, alone
        self._advance, self._end = advance, end
        self._text = self._tokens = 0
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        while not self._closed:
            try:
                with self._alone():
                    piece = self._new()
                if piece is None:
                    self._advance()
            except BaseException:
                with held_interrupts():
                    self._closed = True
                    self._end(self._answer)
                raise
            if piece is not None:
                if piece.reason is not None:
                    self.close()
                return piece
        raise StopIteration

    def close(self) -> None:
        """Cancels what has not ended; its blocks are free at once, or when the step that another
        thread runs is over."""
        if not self._closed:
            with held_interrupts():
                self._closed = True
                self._end(self._answer)

    def __del__(self) -> None:
        if not self._closed:
            self._end(self._answer)

    def _new(self) -> Piece | None:
        """What came since the last piece."""
        answer, request = self._answer, self._answer.request
        if request.reason is not None:
            answer.completion()
        elif len(request.answer) == self._tokens:
            return None
        text, tokens = answer.text[self._text :], request.answer[self._tokens :]
        self._text, self._tokens = self._text + len(text), self._tokens + len(tokens)
        return Piece(text, tokens, request.reason, request.error)
