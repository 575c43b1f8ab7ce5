"""Tokens and text of answers as OpenAI's JSON, whole and in pieces."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lezero.serve.answer import Named
from lezero.serve.request import Reason, Request
from lezero.serve.server.asked import Asked
from lezero.serve.server.coded import TokenText
from lezero.serve.server.worker import Event

_FINISH: dict[Reason, str] = {"stop": "stop", "length": "length"}


@dataclass
class Choice:
    """One answer as it grows."""

    request: Request
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    named: list[Named] = field(default_factory=list)
    reason: Reason | None = None

    def take(self, event: Event) -> None:
        self.text += event.text
        self.tokens += event.tokens
        self.named += event.named
        self.reason = event.reason


class Teller:
    """Makes the JSON of one HTTP request's answers."""

    def __init__(self, asked: Asked, model: str, requests: Sequence[Request], text: TokenText):
        self.choices = [Choice(request) for request in requests]
        self._asked, self._text = asked, text
        self._chat = asked.form == "chat"
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self) -> dict[str, Any]:
        """The answers in one object, for `as_json_in_parts`: choices and tokens are made as they
        are written, since as objects they take several times the bytes of their JSON."""
        choices = itertools.starmap(self._whole_choice, enumerate(self.choices))
        return {**self._head, "choices": choices, "usage": self.usage()}

    def piece(self, event: Event) -> dict[str, Any] | None:
        """A chunk with what an event brought, which is taken; None where a client sees nothing."""
        choice = self.choices[event.index]
        first = not choice.tokens
        choice.tokens += event.tokens  # all that is told again, by their number
        if not (event.text or first or event.named or event.reason):
            return None
        logprobs = self._logprobs(event.named)
        body: dict[str, Any] = {"text": event.text}
        if self._chat:
            delta = {"role": "assistant", "content": event.text} if first else {}
            if event.text:
                delta["content"] = event.text
            body = {"delta": delta}
        found = self._chunk([self._choice(event.index, body, logprobs, event.reason)])
        if self._asked.stream_usage:
            found["usage"] = None
        return found

    def last_piece(self) -> dict[str, Any]:
        """The chunk that tells the usage of a stream."""
        return {**self._chunk([]), "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens of all answers; a prompt that has several is counted once."""
        prompts = [choice.request for choice in self.choices[:: self._asked.n]]
        given = sum(len(request.prompt) for request in prompts)
        made = sum(len(choice.tokens) for choice in self.choices)
        return {
            "prompt_tokens": given,
            "completion_tokens": made,
            "total_tokens": given + made,
            "prompt_tokens_details": {"cached_tokens": sum(r.cached for r in prompts)},
        }

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        body: dict[str, Any] = {"text": choice.text}
        if self._chat:
            body = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        return self._choice(index, body, self._logprobs(choice.named, iter), choice.reason)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": name, "choices": choices}

    def _choice(
        self, index: int, body: dict[str, Any], logprobs: object, reason: Reason | None
    ) -> dict[str, Any]:
        finish = None if reason is None else _FINISH.get(reason, reason)
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(
        self, named: Sequence[Named], many: Callable[[Iterator[Any]], Iterable[Any]] = list
    ) -> dict[str, Any] | None:
        """Log-probabilities of some tokens; None where nobody asked. many: makes an array."""
        if self._asked.params.logprobs is None:
            return None
        if self._chat:
            return {"content": many(map(self._token, named)), "refusal": None}
        return {
            "tokens": [self._text.of(one.token, one.lost) for one in named],
            "token_logprobs": [one.logprob.logprob for one in named],
            "top_logprobs": many(map(self._likeliest, named)),
            "text_offset": [one.place for one in named],
        }

    def _likeliest(self, one: Named) -> dict[str, float]:
        """By name, best first, and always the token itself, as with OpenAI. Of tokens with one
        name, as halves of letters, the likeliest stays, but for the token's own name."""
        found: dict[str, float] = {}
        for token, value in one.logprob.likeliest:
            found.setdefault(self._text.of(token), value)
        found[self._text.of(one.token, one.lost)] = one.logprob.logprob
        return dict(sorted(found.items(), key=lambda pair: pair[1], reverse=True))

    def _token(self, one: Named) -> dict[str, Any]:
        likeliest = [self._entry(*pair) for pair in one.logprob.likeliest]
        own = self._entry(one.token, one.logprob.logprob, one.lost)
        return {**own, "top_logprobs": likeliest}

    def _entry(self, token: int, logprob: float, lost: int = 0) -> dict[str, Any]:
        data = self._text.bytes_of(token, lost)
        return {
            "token": self._text.of(token, lost),
            "logprob": logprob,
            "bytes": None if data is None else list(data),
        }
