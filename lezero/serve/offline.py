"""Many prompts from a file: one JSON object a line in, one a line out, in the same order.

A line has "prompt" (text or tokens) or "messages" (a chat), and may have fields of
`SamplingParams`, which go before those that hold for all lines. What is wrong with a line is told
in its answer; the other lines go on.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from lezero.core.errors import ConfigError
from lezero.serve.llm import LLM, Answer
from lezero.serve.sampling import SamplingParams

_AHEAD = 4
_LONGEST_LINE = 16 << 20


def answer_lines(
    llm: LLM, lines: Iterable[str], params: SamplingParams | None = None
) -> Iterator[dict[str, Any]]:
    """For each line that is not empty: {"line", "text", "reason", "tokens", "prompt_tokens"} or
    {"line", "error"}. "tokens" counts; lines count from 1.

    Reads ahead a few times as many lines as run at once, never the whole file.
    """
    base = (params or SamplingParams()).to_dict()
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
                yield _told(*waiting.popleft())
            if llm.engine.busy:
                _step(llm, waiting)
    finally:
        for _, answer in waiting:
            if isinstance(answer, Answer):
                llm.engine.cancel(answer.request)


def _start(llm: LLM, text: str, base: dict[str, Any]) -> Answer | str:
    """The answer that a line begins, or what is wrong with the line."""
    if len(text) > _LONGEST_LINE:
        return f"the line has {len(text)} characters, allowed are {_LONGEST_LINE}"
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or ("prompt" in data) == ("messages" in data):
            return 'the line is no JSON object with either "prompt" or "messages"'
        own = {key: value for key, value in data.items() if key not in ("prompt", "messages")}
        params = SamplingParams.parse({**base, **own})
        prompt = data["prompt"] if "prompt" in data else llm.prompt_of(data["messages"])
        if not isinstance(prompt, str | list):
            return '"prompt" is neither text nor a list of tokens'
        request = llm.request(prompt, params)
        llm.engine.add(request)
    except (ValueError, RecursionError, ConfigError) as error:
        return str(error)
    return Answer(request, llm.coder)


def _step(llm: LLM, waiting: Iterable[tuple[int, Answer | str]]) -> None:
    answers = {a.request: a for _, a in waiting if isinstance(a, Answer)}
    for request, tokens in llm.engine.step().tokens.items():
        if request in answers:
            answers[request].take(tokens, llm.engine.scheduler)


def _is_done(answer: Answer | str) -> bool:
    return isinstance(answer, str) or answer.request.reason is not None


def _told(line: int, answer: Answer | str) -> dict[str, Any]:
    if isinstance(answer, str):
        return {"line": line, "error": answer}
    found = answer.completion()
    if found.error is not None:
        return {"line": line, "error": found.error}
    counts = {"tokens": len(found.tokens), "prompt_tokens": found.prompt_tokens}
    return {"line": line, "text": found.text, "reason": found.reason, **counts}
