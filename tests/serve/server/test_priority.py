"""A client may let others go first, and may not push ahead."""

from __future__ import annotations

from contextlib import ExitStack

from tests.serve.server.running import read_all, serving, slow_steps, small_llm, until

LONG = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "stream": True}


def test_a_request_that_can_wait_lets_others_go_first() -> None:
    with ExitStack() as stack:
        client = stack.enter_context(serving(small_llm(max_requests=1)))
        quick = stack.enter_context(slow_steps(client.server.llm, 0.2))
        scheduler = client.server.llm.engine.scheduler
        first = stack.enter_context(client.begin({**LONG, "max_tokens": 300}))
        until(lambda: scheduler.running)
        later = stack.enter_context(client.begin({**LONG, "priority": 5}))
        until(lambda: len(scheduler.waiting) == 1)
        sooner = stack.enter_context(client.begin(LONG))
        until(lambda: len(scheduler.waiting) == 2)
        assert [request.priority for request in scheduler.waiting] == [0, 5]
        quick.set()
        for connection in (first, sooner, later):
            assert b"[DONE]" in read_all(connection)


def test_only_numbers_that_lose_are_taken() -> None:
    with serving(small_llm()) as client:
        for value in (-1, 1001, "high", 1.5, True):
            found = client.complete("abc", priority=value)
            assert found.status == 400
            assert found.json["error"]["param"] == "priority"


def test_more_prompts_than_places_are_named() -> None:
    with serving(small_llm(max_requests=1), queue=1) as client:
        found = client.complete(["a", "b", "c"])
    assert found.status == 400
    assert found.json["error"]["param"] == "prompt"
