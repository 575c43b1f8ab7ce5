"""What a question asks of its tokens reaches the engine: over HTTP as from Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from tests.serve.server.running import Client, serving, small_llm

MESSAGES = [{"role": "user", "content": "hello"}]
SEEDED: dict[str, Any] = {"max_tokens": 24, "seed": 7, "ignore_eos": True}
CHANGES: dict[str, Any] = {
    **{"temperature": 0.3, "top_k": 3, "top_p": 0.4, "min_p": 0.3, "repetition_penalty": 1.5},
    **{"presence_penalty": 1.5, "frequency_penalty": 1.5},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Client]:
    with serving(small_llm()) as client:
        yield client


@pytest.fixture(scope="module")
def alone() -> LLM:
    return small_llm()


def from_python(llm: LLM, prompt: str, **fields: Any) -> str:
    return llm.generate(prompt, SamplingParams(**fields))[0].text


@pytest.mark.parametrize("name", CHANGES)
def test_a_parameter_changes_an_answer_as_from_python(
    server: Client, alone: LLM, name: str
) -> None:
    asked = {**SEEDED, name: CHANGES[name]}
    expected = from_python(alone, "abc", **asked)
    assert expected != from_python(alone, "abc", **SEEDED)
    assert server.complete("abc", **asked).json["choices"][0]["text"] == expected


def test_all_of_them_together_in_a_chat(server: Client, alone: LLM) -> None:
    asked = {**SEEDED, "temperature": 2.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    asked |= {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    found = server.ask("/v1/chat/completions", {"messages": MESSAGES, **asked}).json
    expected = from_python(alone, "<user>hello\n<assistant>", **asked)
    assert found["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ({"max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 9}, 5),
        ({"max_completion_tokens": 9, "max_tokens": 5}, 9),
        ({"max_completion_tokens": None, "max_tokens": 7}, 7),
    ],
)
def test_a_chat_ends_where_max_completion_tokens_says(
    server: Client, asked: dict[str, int | None], count: int
) -> None:
    question = {"messages": MESSAGES, "ignore_eos": True, **asked}
    found = server.ask("/v1/chat/completions", question).json
    assert found["usage"]["completion_tokens"] == count
    assert found["choices"][0]["finish_reason"] == "length"
