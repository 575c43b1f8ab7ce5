"""Many prompts from a file: one JSON object a line in, one a line out, in the same order.

A line has "prompt" (text or tokens) or "messages" (a chat), and may have "priority" and fields of
`SamplingParams`, which go before those that hold for all lines. A field with null counts as left
out. What is wrong with a line is told in its answer; the other lines go on.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from lezero.core.errors import ConfigError
from lezero.serve.answer import Answer
from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams

_AHEAD = 4
_LONGEST_LINE = 16 << 20
_NO_PARAMS = ("prompt", "messages", "priority")


def answer_lines(
    llm: LLM, lines: Iterable[str], params: SamplingParams | None = None
) -> Iterator[dict[str, Any]]:
    """For each line that is not empty: {"line", "text", "reason", "tokens", "prompt_tokens"} or
    {"line", "error"}. "tokens" counts; lines count from 1. A line that asks for
    log-probabilities is given "logprobs", one object a token. A model without a tokenizer gives no
    text, but "token_ids". Where neither a line nor `params` says how many tokens at most, as many
    as are usual or fit. Bytes that are no UTF-8 are expected
    as `errors="surrogateescape"` reads them.

    Reads ahead a few times as many lines as run at once, never the whole file.
    """
    base = {} if params is None else params.to_dict()
    if params is None or "max_tokens" not in params.model_fields_set:
        base.pop("max_tokens", None)
    numbered = ((number, text) for number, text in enumerate(lines, 1) if text.strip())
    waiting: deque[tuple[int, Answer | str]] = deque()
    most = _AHEAD * llm.engine.scheduler.max_requests
    left = True
    try:
        while left or waiting:
            while left and len(waiting) < most:
                found = next(numbered, None)
                left = found is not None
                if found is not None:
                    waiting.append((found[0], _start(llm, found[1], base)))
            while waiting and _is_done(waiting[0][1]):
                yield _told(llm, *waiting.popleft())
            if waiting:
                llm.advance()
    finally:
        for _, answer in waiting:
            if isinstance(answer, Answer):
                llm.end(answer)


def _start(llm: LLM, text: str, base: dict[str, Any]) -> Answer | str:
    """The answer that a line begins, or what is wrong with the line."""
    if len(text) > _LONGEST_LINE:
        return f"the line has {len(text)} characters, allowed are {_LONGEST_LINE}"
    if any("\udc80" <= letter <= "\udcff" for letter in text):
        return "the line is not UTF-8"
    try:
        data = _without_nulls(json.loads(text))
        if not isinstance(data, dict) or ("prompt" in data) == ("messages" in data):
            return 'the line is no JSON object with either "prompt" or "messages"'
        own = {key: value for key, value in data.items() if key not in _NO_PARAMS}
        params = SamplingParams.parse({**base, **own})
        prompt = data["prompt"] if "prompt" in data else llm.chat_tokens(data["messages"])
        if not isinstance(prompt, str | list):
            return '"prompt" is neither text nor a list of tokens'
        if "max_tokens" not in {*base, *own}:
            prompt = llm.request(prompt, params).prompt
            most = max(1, min(params.max_tokens, llm.room - len(prompt)))
            params = params.model_copy(update={"max_tokens": most})
        return llm.begin(llm.request(prompt, params, priority=data.get("priority", 0)))
    except (ValueError, RecursionError, ConfigError) as error:
        return str(error)


def _without_nulls(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    return {key: value for key, value in data.items() if value is not None}


def _is_done(answer: Answer | str) -> bool:
    return isinstance(answer, str) or answer.request.reason is not None


def _told(llm: LLM, line: int, answer: Answer | str) -> dict[str, Any]:
    if isinstance(answer, str):
        return {"line": line, "error": answer}
    llm.end(answer)
    found = answer.completion()
    if found.error is not None:
        return {"line": line, "error": found.error}
    counts = {"tokens": len(found.tokens), "prompt_tokens": found.prompt_tokens}
    told: dict[str, Any] = {"line": line, "text": found.text, "reason": found.reason, **counts}
    if llm.coder is None:
        told["token_ids"] = found.tokens
    if found.logprobs is not None:
        told["logprobs"] = [
            {"token": token, "logprob": one.logprob, "likeliest": [list(x) for x in one.likeliest]}
            for token, one in zip(found.tokens, found.logprobs, strict=True)
        ]
    return told
