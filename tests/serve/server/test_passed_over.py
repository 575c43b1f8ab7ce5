"""What clients send that asks for nothing is passed over, and what asks for more is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lezero.serve.server.asked import read_asked
from lezero.serve.server.problem import Problem
from tests.serve.server.running import serving, small_llm

HELLO = {"role": "user", "content": "hello"}


def asked(message: dict[str, Any], **fields: Any) -> Any:
    return read_asked("chat", {"messages": [{**HELLO, **message}], **fields}, "m")


@pytest.mark.parametrize(
    "notes",
    [
        {"type": "text"},  # lm-eval
        {"provider_specific_fields": {"refusal": None}},  # LiteLLM, of this server's own answer
        {"id": 73, "opts": {"visible": True}},  # CodeCompanion
        {"annotations": [], "audio": None, "tool_calls": [], "function_call": {"name": None}},
        {"reasoning_content": "", "thinking_blocks": None, "prefix": False},
    ],
)
def test_a_clients_own_notes_beside_a_message_are_passed_over(notes: dict[str, Any]) -> None:
    assert asked(notes) == asked({})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_calls", [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]),
        ("tool_calls", [{}]),
        ("tool_call_id", "1"),
        ("function_call", {"name": "f", "arguments": None}),
        ("audio", {"id": "1"}),
        ("images", ["aGVsbG8="]),
        ("reasoning_content", "hm"),
        ("thinking_blocks", [{"thinking": "hm"}]),
        ("prefix", True),
    ],
)
def test_what_a_model_should_have_read_in_a_message_is_refused(name: str, value: Any) -> None:
    with pytest.raises(Problem, match="not supported") as found:
        asked({name: value})
    assert found.value.param == f"messages[0].{name}"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_options": {"ttl": "30m"}},
        {"prediction": {"type": "content", "content": "hello"}},
        {"logprobs": False, "top_logprobs": 0},
    ],
)
def test_fields_that_change_no_answer_are_passed_over(fields: dict[str, Any]) -> None:
    assert asked({}, **fields) == asked({})


def test_usage_in_every_piece_is_passed_over() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert asked({}, stream=True, stream_options=options).stream_usage


def test_a_byte_order_mark_before_a_body_is_passed_over() -> None:
    mark = "\ufeff".encode()
    bodies = {
        "/v1/completions": {"prompt": "\ufeffabc", "max_tokens": 2, "temperature": 0},
        "/v1/chat/completions": {"messages": [HELLO], "max_tokens": 2, "temperature": 0},
        "/v1/embeddings": {"input": "abc"},
    }
    with serving(small_llm()) as client:
        for path, body in bodies.items():
            plain = json.dumps(body).encode()
            found, expected = client.ask(path, mark + plain), client.ask(path, plain)
            assert found.status == expected.status == 200
            for name in ("choices", "data"):
                assert found.json.get(name) == expected.json.get(name)
            for wrong in (mark, mark + mark + plain, plain[:1] + mark + plain[1:]):
                refused = client.ask(path, wrong)
                assert refused.status == 400
                assert refused.error["message"].startswith("the body is not JSON: Expecting ")
                assert "utf-8-sig" not in refused.error["message"]


def test_a_top_p_of_zero_is_the_likeliest_token() -> None:
    with serving(small_llm()) as client:
        (likeliest,) = client.complete("abc", temperature=0).json["choices"]
        for given in (0, 0.0):
            found = client.complete("abc", temperature=5, top_p=given, seed=1).json["choices"]
            assert found == [likeliest]
        for refused in (False, -0.1, "0"):
            assert client.complete("abc", top_p=refused).error["param"] == "top_p"
