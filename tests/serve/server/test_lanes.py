"""Prompts that take long to encode: what others, limits and leaving notice of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lezero.serve.batching.module import InferModule
from lezero.serve.server import app, host
from lezero.serve.server.batched import BatchFace
from lezero.serve.server.exchange import as_json, as_json_in_parts
from tests.serve.server.batch_running import Net, serving_batches
from tests.serve.server.running import Client, serving, small_llm, until

LONG = "x" * 20_000


class Slow:
    """A tokenizer that waits for its gate where a text is long, and counts such texts."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.gate, self.begun = inner, threading.Event(), 0

    def encode(self, text: str) -> list[int]:
        if len(text) > 1000:
            self.begun += 1
            assert self.gate.wait(20)
        return self._inner.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self._inner.decode(tokens)


def slowed(**options: Any) -> tuple[Any, Slow]:
    llm = small_llm(**options)
    assert llm.coder is not None
    slow = llm.coder._inner = Slow(llm.coder._inner)
    return llm, slow


PATHS = {"/v1/completions": "prompt", "/v1/embeddings": "input"}


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return request.param


def begin(client: Client, path: str) -> Any:
    return client.begin({PATHS[path]: LONG}, path)


def ask(client: Client, path: str) -> Any:
    return client.ask(path, {PATHS[path]: "abc"})


def test_short_texts_pass_long_ones(path: str) -> None:
    llm, slow = slowed()
    with serving(llm) as client:
        waiting = [begin(client, path) for _ in range(5)]
        until(lambda: client.server.worker.active == 5)
        until(lambda: slow.begun == 1)
        assert ask(client, path).status == 200
        assert slow.begun == 1
        slow.gate.set()
        for connection in waiting:
            with connection:
                assert b" 400 " in connection.recv(4096)
        until(lambda: client.server.worker.active == 0)


def test_a_text_that_is_read_without_end_is_told_as_stalled(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, slow = slowed()
    with serving(llm) as client:
        assert client.ask("/health").json == {"status": "ok"}
        monkeypatch.setattr(app, "_STALLED_S", 0.05)
        with begin(client, path) as connection:
            until(lambda: client.ask("/health").json == {"status": "stalled"})
            slow.gate.set()
            assert connection.recv(4096)
        until(lambda: client.ask("/health").json == {"status": "ok"})


def test_many_empty_messages_are_long() -> None:
    llm, slow = slowed()
    with serving(llm) as client:
        many = [{"role": "user", "content": ""}] * 2000
        with client.begin({"messages": many}, "/v1/chat/completions") as waiting:
            until(lambda: slow.begun == 1)
            assert ask(client, "/v1/completions").status == 200
            slow.gate.set()
            assert b" 400 " in waiting.recv(4096)


def test_texts_that_are_encoded_have_places(path: str) -> None:
    llm, slow = slowed(max_requests=1)
    with serving(llm, queue=0) as client, begin(client, path) as first:
        until(lambda: slow.begun == 1)
        found = ask(client, path)
        assert found.status == 429
        assert found.error["code"] == "queue_full"
        slow.gate.set()
        assert b" 400 " in first.recv(4096)
        assert ask(client, path).status == 200


def test_those_who_leave_before_their_turn_are_not_encoded(path: str) -> None:
    llm, slow = slowed()
    with serving(llm) as client, begin(client, path):
        until(lambda: slow.begun == 1)
        leaving = [begin(client, path) for _ in range(4)]
        until(lambda: client.server.worker.active == 5)  # else some are read after they have left
        for connection in leaving:
            connection.close()
        until(lambda: client.server.worker.active == 1)
        slow.gate.set()
        until(lambda: client.server.worker.active == 0)
        assert slow.begun == 1


def test_encoding_counts_as_time_of_the_request(path: str) -> None:
    llm, slow = slowed()
    with serving(llm, request_s=0.3) as client, begin(client, path) as connection:
        assert b" 504 " in connection.recv(4096)
        assert slow.begun == 1
        assert client.server.worker.active == 0
        slow.gate.set()


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds the reading of bodies back that have more than 100 rows."""
    from lezero.serve.server import batched

    gate, read = threading.Event(), batched.read_inputs

    def slow(body: bytes, *rest: Any) -> Any:
        assert len(body) < 1000 or gate.wait(20)
        return read(body, *rest)

    monkeypatch.setattr(batched, "read_inputs", slow)
    yield gate
    gate.set()


def test_encoding_counts_as_time_to_the_first_token() -> None:
    llm, slow = slowed(longest=2048)
    with serving(llm) as client:
        with client.begin({"prompt": "x" * 1100, "max_tokens": 2}) as connection:
            until(lambda: slow.begun == 1)
            time.sleep(0.5)
            slow.gate.set()
            assert b" 200 " in connection.recv(4096)
        assert client.server.face.metrics.first_token_s.sum >= 0.5


def test_bodies_of_modules_wait_in_a_bounded_queue_of_their_own(reading: threading.Event) -> None:
    short, long = {"inputs": [0, 0, 0, 0]}, {"inputs": [[0.0, 0, 0, 0]] * 1500}
    with serving_batches(InferModule(Net(), torch.zeros(1, 4)), queue=1) as client:
        face = client.server.face
        assert isinstance(face, BatchFace)
        lane = face._lanes.of(1 << 20)
        waiting = [client.begin(long, "/v1/infer") for _ in range(2)]
        until(lambda: lane.active == 2)
        refused = client.ask("/v1/infer", long)
        assert refused.status == 429
        assert refused.error["code"] == "queue_full"
        assert client.ask("/v1/infer", short).status == 200
        waiting.pop().close()
        until(lambda: lane.active == 1)
        reading.set()
        with waiting[0] as connection:
            assert b" 200 " in connection.recv(4096)


def test_what_is_read_of_a_body_counts_as_time_of_the_request(reading: threading.Event) -> None:
    with serving_batches(InferModule(Net(), torch.zeros(1, 4)), request_s=0.3) as client:
        began = time.monotonic()
        assert client.ask("/v1/infer", {"inputs": [[0.0, 0, 0, 0]] * 1500}).status == 504
        assert time.monotonic() - began < 15
        reading.set()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the threads in which long bodies are read and written."""
    from lezero.serve.server import answers, embedding, inference, language

    found: set[str] = set()

    def heard(work: Any) -> Any:
        def run(*given: Any) -> Any:
            found.add(threading.current_thread().name.rpartition("_")[0])
            return work(*given)

        return run

    parts = "as_json_in_parts"
    for place, name in ((answers, parts), (embedding, "as_json"), (inference, "as_json")):
        monkeypatch.setattr(place, name, heard(getattr(place, name)))
    monkeypatch.setattr(language, "parse", heard(language.parse))
    return found


def test_long_answers_are_written_beside_the_event_loop(threads: set[str]) -> None:
    many = {"max_tokens": 80, "n": 5, "logprobs": 20, "ignore_eos": True}
    with serving(small_llm()) as client:
        choices = client.complete("abc", **many).json["choices"]
        assert len(choices) == 5
        assert all(len(x["logprobs"]["tokens"]) == 80 for x in choices)
        assert client.ask("/v1/embeddings", {"input": ["abc"] * 100}).status == 200
    assert threads - {""} == {"lezero-encoder-short", "lezero-encoder-long"}


def test_long_bodies_are_read_beside_the_event_loop(threads: set[str]) -> None:
    with serving(small_llm()) as client:
        assert client.complete([1, 2], max_tokens=1).status == 200
        assert threads == {""}, "a short one is read at once"
        long = [1] * 40_000
        for path, name in PATHS.items():
            assert client.ask(path, {name: long}).status == 400
            assert "lezero-encoder-long" in threads
            threads.clear()


def test_json_in_parts_is_the_same() -> None:
    for value in (
        *(1.5, "ü", None, [], {}, [1, 2], {"a": {}, "b": []}),
        {"data": [{"x": [0.1, 0.2], "y": "é"}, {"x": []}], "n": 3},
        [[[[[[[{"deep": [1, {"er": 2}]}]]]]]], [["a"]]],
    ):
        assert as_json_in_parts(value) == as_json(value)


def test_memory_of_a_vast_text_goes_back(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(
        "lezero.serve.server.coded.give_back_free_blocks", lambda: given_back.append(True)
    )
    with serving(small_llm()) as client:
        assert client.ask(path, {PATHS[path]: "x"}).status == 200
        assert not given_back
        assert client.ask(path, {PATHS[path]: "x" * (1 << 17)}).status == 400
        assert given_back == [True]


@pytest.mark.parametrize(("lane_s", "what"), [(0.0, "a step"), (9.0, "the reading or writing")])
def test_the_end_names_what_hangs(
    lane_s: float, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(host, "_LAST_STEP_S", 0.01)
    monkeypatch.setattr(host.os, "_exit", lambda status: ended.set())
    monkeypatch.setattr(host.logging, "shutdown", lambda: None)
    face: Any = SimpleNamespace(stalled_s=lambda: 5.0, lane_s=lambda: lane_s)
    with host._patience(face):
        assert ended.wait(20)
    assert what in caplog.text
    assert f"runs for {max(5.0, lane_s):.0f} s" in caplog.text
