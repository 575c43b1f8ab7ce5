"""Questions of the soak and their answers, which the engine alone gave before."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

_PREFIX = (
    "The library keeps keys and values of a prompt in blocks, and requests that begin with the "
    "same text share them. A block is freed when the last request that holds it has ended. "
)
_WORDS = (
    *("water", "light", "stone", "paper", "green", "river", "engine", "number", "winter"),
    *("silver", "garden", "letter"),
)


@dataclass(frozen=True)
class Question:
    """A body without `stream`, and for each choice what must come."""

    path: str
    body: dict[str, Any]
    texts: Sequence[str]
    reasons: Sequence[str]
    logprobs: Sequence[list[float]]
    tokens: int

    @property
    def chat(self) -> bool:
        return "messages" in self.body


@dataclass
class Told:
    """What came for a question, choice by choice."""

    texts: list[str]
    reasons: list[str | None]
    logprobs: list[list[float]]
    tokens: int | None = None
    done: bool = False
    error: str = ""

    @classmethod
    def nothing(cls, count: int) -> Told:
        return cls([""] * count, [None] * count, [[] for _ in range(count)])

    def whole(self, found: dict[str, Any]) -> None:
        for choice in found["choices"]:
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            self._take(choice, text)
        self.tokens, self.done = found["usage"]["completion_tokens"], True

    def event(self, data: bytes) -> None:
        """One event of a stream, without "data: "."""
        if data == b"[DONE]":
            self.done = True
            return
        found = json.loads(data)
        if "error" in found:
            self.error = str(found["error"])[:200]
            return
        if found.get("usage"):
            self.tokens = found["usage"]["completion_tokens"]
        for choice in found["choices"]:
            delta = choice.get("delta")
            self._take(choice, choice["text"] if delta is None else delta.get("content") or "")

    def _take(self, choice: dict[str, Any], text: str) -> None:
        index, logprobs = choice["index"], choice["logprobs"]
        self.texts[index] += text
        self.reasons[index] = choice["finish_reason"] or self.reasons[index]
        if logprobs and "content" in logprobs:
            self.logprobs[index] += [entry["logprob"] for entry in logprobs["content"]]
        elif logprobs:
            self.logprobs[index] += logprobs["token_logprobs"]

    def problem(self, question: Question, left: bool = False) -> str:
        """What differs from the right answer; `left`: the client read only a part of it."""
        if self.error:
            return f"an error in the stream: {self.error}"
        if left:
            for got, right in zip(self.texts, question.texts, strict=True):
                if not right.startswith(got):
                    return f"got {got!r}, which does not begin {right!r}"
            return ""
        found = (self.texts, self.reasons, self.logprobs, self.tokens)
        right = (question.texts, question.reasons, question.logprobs, question.tokens)
        if not self.done:
            return "it did not end"
        return "" if found == tuple(right) else f"got {found}, right is {right}"


@dataclass
class Asker:
    """Makes questions by chance, and asks the engine alone."""

    llm: Any
    drawn: random.Random = field(default_factory=lambda: random.Random(5))

    def questions(self, count: int) -> list[Question]:
        return [self._make(number) for number in range(count)]

    def _make(self, number: int) -> Question:
        from lezero.serve.sampling import SamplingParams

        draw = self.drawn
        text = " ".join(draw.choices(_WORDS, k=draw.randint(1, 12)))
        if number % 3:
            text = _PREFIX * (1 + number % 2) + text
        count = 2 if number % 7 == 3 else 1
        fields: dict[str, Any] = {"max_tokens": draw.randint(4, 40)}
        if number % 2:
            fields |= {"temperature": draw.choice([0.5, 1.0]), "seed": draw.randrange(1 << 40)}
            fields |= draw.choice([{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}])
            fields |= draw.choice([{}, {"repetition_penalty": 1.2}, {"frequency_penalty": 0.5}])
        else:
            fields["temperature"] = 0
        if number % 4 == 1:
            fields["ignore_eos"] = True
        chat = number % 5 in (1, 3)
        prompt = self.llm.prompt_of([{"role": "user", "content": text}]) if chat else text
        with_logprobs = number % 3 == 0
        params = SamplingParams(**fields, logprobs=0 if with_logprobs else None)
        if number % 6 == 5:  # a stop string that comes
            said = self.llm.generate(prompt, params)[0].text
            if len(said) > 8:
                fields["stop"] = [said[len(said) // 2 :][:3]]
                params = SamplingParams(**fields, logprobs=0 if with_logprobs else None)
        requests = [self.llm.request(prompt, params, sample=i) for i in range(count)]
        begun = [self.llm.begin(request) for request in requests]
        while any(request.reason is None for request in requests):
            self.llm.advance()
        for answer in begun:
            self.llm.end(answer)
        found = [answer.completion() for answer in begun]
        if count > 1:
            fields["n"] = count
        body = {"prompt": text, **fields}
        if chat:
            body = {"messages": [{"role": "user", "content": text}], **fields}
        if with_logprobs:
            body["logprobs"] = True if chat else 0
        path = "/v1/chat/completions" if chat else "/v1/completions"
        return self._answered(path, body, found)

    def _answered(self, path: str, body: dict[str, Any], found: Iterable[Any]) -> Question:
        found = list(found)
        ends = self.llm.coder.end_tokens
        logprobs = []
        for one in found:
            values = [x.logprob for x in one.logprobs or []]
            if values and one.reason == "stop" and one.tokens[-1] in ends:
                values.pop()  # the token that ends a text is not shown
            logprobs.append(values)
        return Question(
            path,
            body,
            [one.text for one in found],
            [one.reason for one in found],
            logprobs,
            sum(len(one.tokens) for one in found),
        )
