"""Embeddings of a language model over HTTP, beside answers, poison and clients that leave."""

from __future__ import annotations

import threading
from typing import Any

from lezero.core.errors import ConfigError
from tests.serve.server.running import Client, serving, until
from tests.serve.server.test_worker import PARAMS, POISON, alone, poisoned_llm, prompts


def embed(client: Client, given: Any, **fields: Any) -> Any:
    return client.ask("/v1/embeddings", {"input": given, **fields})


def vectors(client: Client, given: Any) -> list[list[float]]:
    found = embed(client, given)
    assert found.status == 200, found.body
    return [entry["embedding"] for entry in found.json["data"]]


def test_embeddings_and_answers_beside_each_other_are_the_same_as_alone() -> None:
    given = prompts(8)
    expected, answers = poisoned_llm().embed(given), alone(given)
    with serving(poisoned_llm()) as client:
        wrong: list[Any] = []

        def ask(number: int) -> None:
            for _ in range(3):
                if vectors(client, given) != expected:
                    wrong.append("vectors")
                (choice,) = client.complete(given[number], **PARAMS).json["choices"]
                if choice["text"] != answers[number][0]:
                    wrong.append("answer")
                if embed(client, [given[0], [POISON, 1]]).status != 500:
                    wrong.append("poison")

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert client.ask("/health").status == 200
        until(lambda: client.server.llm.engine.pool.used_count == 0)


def test_what_is_wrong_is_told() -> None:
    with serving(poisoned_llm(context=64)) as client:
        long = embed(client, ["ab", "x" * 70]).error
        assert "input[1]: got 70 tokens, allowed is 1 to 64" in long["message"]
        assert (long["param"], long["code"]) == ("input[1]", "context_length_exceeded")
        assert embed(client, ["ab", [999]]).error["param"] == "input[1]"
        for given, name in (("", "input[0]"), (["ab", ""], "input[1]")):
            empty = embed(client, given)
            assert (empty.status, empty.error["param"]) == (400, name)
            assert f"{name}: got an empty text" in empty.error["message"]
        assert embed(client, "ab", dimensions=64).status == 200
        for wanted, dim in ((32, "64"), ("64", "the length"), (True, "the length")):
            other = embed(client, "ab", dimensions=wanted).error
            assert other["param"] == "dimensions"
            assert f"allowed is {dim}" in other["message"]
        assert embed(client, "x" * 70).status == 400
        assert embed(client, "x" * 70, truncate=True).status == 200
        assert embed(client, [[999]]).status == 400
        assert embed(client, [1, POISON]).error["code"] == "engine_error"


def test_an_engine_that_fails_tells_its_client(caplog: Any) -> None:
    llm = poisoned_llm()
    states = llm.program.states

    def broken(fed: Any) -> Any:
        if fed[0].tokens[0] == 99:
            raise RuntimeError("a bug in a kernel")
        return states(fed)

    llm.program.states = broken  # type: ignore[method-assign]
    with serving(llm) as client:
        found = embed(client, [[99, 1]])
        assert found.status == 500
        assert "bug" not in found.error["message"]
        assert embed(client, [[98, 1]]).status == 200
        assert client.ask("/health").status == 200
        assert client.server.metrics.failed_steps == 1


def test_a_model_that_makes_no_embeddings_says_so(caplog: Any) -> None:
    llm = poisoned_llm()

    def states(fed: Any) -> Any:  # as of transformers' models whose base gives logits
        raise ConfigError("x gives no hidden states by themselves, so it makes no embeddings")

    llm.program.states = states  # type: ignore[method-assign]
    with serving(llm) as client:
        found = embed(client, [[99, 1]])
        assert found.status == 400
        assert "makes no embeddings" in found.error["message"]
        assert found.error["param"] is None
        assert client.server.metrics.failed_steps == 0
        until(lambda: llm.engine.pool.used_count == 0)
    assert not caplog.records


def test_a_client_that_leaves_gives_its_place_up_and_a_full_server_says_so() -> None:
    llm = poisoned_llm(max_requests=1)
    held, states = threading.Event(), llm.program.states

    def slow(fed: Any) -> Any:
        assert list(fed[0].tokens) != [1, 2] or held.wait(30)
        return states(fed)

    llm.program.states = slow  # type: ignore[method-assign]
    with serving(llm, queue=0) as client:
        connection = client.begin({"input": [[1, 2]] * 2000}, "/v1/embeddings")
        until(lambda: client.server.worker.active == 1)
        found = embed(client, "abc")
        assert found.status == 429
        assert "retry-after" in found.headers
        connection.close()
        held.set()
        until(lambda: client.server.worker.active == 0, 30)
        assert vectors(client, "abc")


def numbers(client: Client) -> dict[str, float]:
    lines = client.ask("/metrics").body.decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name.removeprefix("lezero_"): float(value) for name, _, value in pairs}


def test_embeddings_are_counted_among_prompts_and_while_they_run() -> None:
    llm = poisoned_llm(context=256)
    gate, begun, states = threading.Event(), threading.Event(), llm.program.states

    def slow(fed: Any) -> Any:
        begun.set()
        assert gate.wait(20)
        return states(fed)

    llm.program.states = slow  # type: ignore[method-assign]
    with serving(llm) as client:
        threads = [threading.Thread(target=embed, args=(client, [[5] * 9])) for _ in range(3)]
        threads[0].start()
        assert begun.wait(20)
        found = numbers(client)
        assert (found["requests_running"], found["requests_waiting"]) == (1, 0)
        for thread in threads[1:]:
            thread.start()
        until(lambda: client.server.worker.active == 3)
        found = numbers(client)
        assert (found["requests_running"], found["requests_waiting"]) == (1, 2)
        leaves = client.begin({"input": [[5] * 9]}, "/v1/embeddings")
        until(lambda: client.server.worker.active == 4)
        leaves.close()
        until(lambda: client.server.worker.active == 3)
        gate.set()
        for thread in threads:
            thread.join(20)
        client.complete([1, 2], max_tokens=1)
        found = numbers(client)
        assert (found["prompt_tokens_total"], found["embedded_tokens_total"]) == (29, 27)
        assert (found["requests_running"], found["requests_waiting"]) == (0, 0)
        stats = client.ask("/stats").json
        assert (stats["tokens_in"], stats["tokens_embedded"]) == (29, 27)
