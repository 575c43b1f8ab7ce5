"""Many prompts from a file: one JSON object a line in, one a line out, in the same order.

A line has "prompt" (text or tokens) or "messages" (a chat), and may have "priority", an "id" (text
or a whole number), which its answer has too, and fields of `SamplingParams`, which go before those
that hold for all lines. A field with null counts as left out. What is wrong with a line is told in
its answer; the other lines go on.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from lezero.core.errors import ConfigError, LeZeroError, OrderError
from lezero.core.interrupts import held_interrupts
from lezero.serve.answer import Answer
from lezero.serve.llm import LLM
from lezero.serve.pairs import name_twice
from lezero.serve.request import Request
from lezero.serve.sampling import SamplingParams

_AHEAD = 4
_LONGEST_LINE = 16 << 20
_NO_PARAMS = ("prompt", "messages", "priority", "id")


def answer_lines(
    llm: LLM, lines: Iterable[str], params: SamplingParams | None = None
) -> Iterator[dict[str, Any]]:
    """For each line that is not empty: {"line", "text", "reason", "tokens", "prompt_tokens"} or
    {"line", "error"}, where the error names line and field, and "id" behind "line" where the line
    has one. "tokens" counts; lines count from 1. A
    line that asks for log-probabilities is given "logprobs", one object a token. A model without a
    tokenizer gives no text, but "token_ids". Where neither a line nor `params` says how many tokens
    at most, as many as are usual or fit. Bytes that are no UTF-8 are expected as
    `errors="surrogateescape"` reads them.

    Reads ahead a few times as many lines as run at once, never the whole file.
    """
    base = {} if params is None else params.model_dump(exclude_unset=True)
    numbered = ((number, text) for number, text in enumerate(lines, 1) if text.strip())
    waiting: deque[tuple[dict[str, Any], Answer | str]] = deque()
    most = _AHEAD * llm.engine.scheduler.max_requests
    left = True
    try:
        while left or waiting:
            while left and len(waiting) < most:
                found = next(numbered, None)
                left = found is not None
                if found is not None:
                    named, asked = _read(llm, *found, base)
                    with held_interrupts():  # what is begun is ended below
                        waiting.append((named, _begun(llm, found[0], asked)))
            while waiting and _is_done(waiting[0][1]):
                told = _told(llm, *waiting[0])
                waiting.popleft()
                yield told
            if waiting:
                llm.advance()
    finally:
        for _, answer in waiting:
            if isinstance(answer, Answer):
                llm.end(answer)


def _read(
    llm: LLM, number: int, text: str, base: dict[str, Any]
) -> tuple[dict[str, Any], Request | str]:
    """What names a line, and what it asks for, or what is wrong with it."""
    named: dict[str, Any] = {"line": number}
    try:
        data = _object(text)
        if "id" in data:
            named["id"] = _id(data["id"])
        return named, _request(llm, data, base)
    except Exception as error:  # a tokenizer may raise anything
        return named, _wrong(number, error)


def _begun(llm: LLM, number: int, asked: Request | str) -> Answer | str:
    """The answer to what a line asks for, or what is wrong with it."""
    if isinstance(asked, str):
        return asked
    try:
        return llm.begin(asked)
    except Exception as error:
        return _wrong(number, error)


def _wrong(number: int, error: Exception) -> str:
    if isinstance(error, OrderError):  # of this process, not of the line
        raise error
    kind = "" if isinstance(error, LeZeroError | ValueError) else f"{type(error).__name__}: "
    return f"line {number}: {kind}{error}"


def _id(value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f"id: got {value!r:.80}, allowed is text or a whole number")
    return value


def _request(llm: LLM, data: dict[str, Any], base: dict[str, Any]) -> Request:
    own = {key: value for key, value in data.items() if key not in _NO_PARAMS}
    params = SamplingParams(**{**base, **own})
    prompt = data["prompt"] if "prompt" in data else llm.chat_tokens(data["messages"])
    if not isinstance(prompt, str | list):
        raise ConfigError("prompt: is neither text nor a list of tokens")
    return llm.request(prompt, params, priority=data.get("priority", 0))


def _object(text: str) -> dict[str, Any]:
    """What a line says. Raises `ConfigError` for what is no object with a prompt or messages."""
    if len(text) > _LONGEST_LINE:
        raise ConfigError(f"has {len(text)} characters, allowed are {_LONGEST_LINE}")
    if any("\udc80" <= letter <= "\udcff" for letter in text):
        raise ConfigError("is not UTF-8")
    try:
        data = _without_nulls(_READER.decode(text.removeprefix("\ufeff")))
    except ConfigError:
        raise
    except json.JSONDecodeError as error:
        raise ConfigError(f"is no JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ConfigError("is nested too deep") from None
    except ValueError:  # Python's bound for whole numbers
        most = sys.get_int_max_str_digits()
        raise ConfigError(f"has a number of more than {most} digits") from None
    if not isinstance(data, dict) or ("prompt" in data) == ("messages" in data):
        raise ConfigError('is no JSON object with either "prompt" or "messages"')
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (twice := name_twice(pairs)) is not None:
        raise ConfigError(f"has {twice[:80]!a} twice in one object; leave one of them out")
    return dict(pairs)


_READER = json.JSONDecoder(object_pairs_hook=_once)


def _without_nulls(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    return {key: value for key, value in data.items() if value is not None}


def _is_done(answer: Answer | str) -> bool:
    return isinstance(answer, str) or answer.request.reason is not None


def _told(llm: LLM, named: dict[str, Any], answer: Answer | str) -> dict[str, Any]:
    if isinstance(answer, str):
        return {**named, "error": answer}
    llm.end(answer)
    found = llm.completion(answer)
    if found.error is not None:
        return {**named, "error": found.error}
    counts = {"tokens": len(found.tokens), "prompt_tokens": found.prompt_tokens}
    told = {**named, "text": found.text, "reason": found.reason, **counts}
    if llm.coder is None:
        told["token_ids"] = found.tokens
    if found.logprobs is not None:
        told["logprobs"] = [
            {"token": token, "logprob": one.logprob, "likeliest": [list(x) for x in one.likeliest]}
            for token, one in zip(found.tokens, found.logprobs, strict=True)
        ]
    return told
