"""How much memory all answers take while their clients read them, and all bodies that come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import weakref
from typing import Any

import pytest
import torch

from lezero.serve.batching.module import InferModule
from lezero.serve.server import batched, embedded, inference
from lezero.serve.server.embedding import Embeddings, told_embeddings
from lezero.serve.server.exchange import JSON, Exchange
from tests.serve.server.batch_running import Net, serving_batches
from tests.serve.server.running import head, read_all, serving, small_llm, until
from tests.serve.server.test_slow_readers import BODY, asked, with_long_answer

MIB = 1 << 20


def read_a_little(made: socket.socket, seconds: float) -> None:
    """Reads so slowly that the answer would take minutes."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        made.recv(1 << 16)
        time.sleep(0.02)


def test_where_answers_that_wait_take_too_much_nothing_is_begun() -> None:
    with serving(small_llm(), answers_bytes=MIB) as client:
        with_long_answer(client)
        with asked(client) as made:
            until(lambda: client.server.app.held.bytes == len(BODY))
            for path, body in (
                ("/v1/completions", {"prompt": "abc", "max_tokens": 2}),
                ("/v1/embeddings", {"input": "abc"}),
            ):
                refused = client.ask(path, body)
                assert (refused.status, refused.error["code"]) == (503, "overloaded")
                assert "answers of 16384 KiB" in refused.error["message"]
                assert refused.headers["retry-after"] == "1"
            assert client.ask("/health").status == 200
            while made.recv(1 << 20):
                pass
        until(lambda: client.server.app.held.bytes == 0)
        assert client.complete("abc", max_tokens=2).status == 200


def test_who_has_read_for_long_gives_way_to_others() -> None:
    with serving(small_llm(), answers_bytes=MIB) as client:
        with_long_answer(client)
        held = client.server.app.held
        with asked(client) as made:
            read_a_little(made, 0.1)
            for _ in range(2):
                assert client.complete("abc", max_tokens=2).status == 503
            held._patience_s = 0.05
            assert client.complete("abc", max_tokens=2).status == 503
            until(lambda: held.bytes == 0)
            assert client.complete("abc", max_tokens=2).status == 200


def test_embeddings_count_before_they_are_made() -> None:
    with serving(small_llm(), answers_bytes=MIB) as client:
        held = client.server.app.held
        held.bytes += MIB - (100 << 10)
        many = {"input": ["a"] * 64}  # of 64 numbers: 104 KiB as JSON, 40 as bytes
        assert client.ask("/v1/embeddings", many).status == 503
        assert client.ask("/v1/embeddings", {**many, "encoding_format": "base64"}).status == 200
        until(lambda: held.bytes == MIB - (100 << 10))
        held.bytes = 0
        assert client.ask("/v1/embeddings", {"input": ["a"] * 1024}).status == 200, "alone"
        until(lambda: held.bytes == 0)


def test_bodies_that_come_count_apart_and_long_ones_are_refused() -> None:
    long = {"prompt": "abc", "max_tokens": 2, "user": "x" * (100 << 10)}
    with serving(small_llm(), answers_bytes=MIB) as client, contextlib.ExitStack() as stack:
        held = client.server.app.held

        def begin(length: int) -> socket.socket:
            made = stack.enter_context(client.connect())
            made.sendall(head("/v1/completions", MIB) + b" " * length)
            return made

        senders = [begin(900 << 10) for _ in range(2)]  # no one of them is alone too much
        until(lambda: held.bodies == 1800 << 10)
        refused = client.ask("/v1/completions", long)
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        assert "bodies of " in refused.error["message"]
        assert refused.headers["retry-after"] == "1"
        assert client.complete("abc", max_tokens=2).status == 200, "a short body"
        until(lambda: (held.bodies, held.bytes) == (1800 << 10, 0))
        with begin(100 << 10) as third:
            told = read_all(third)  # behind a second, in which what it sends is thrown away
            assert told.startswith(b"HTTP/1.1 503 ")
            assert b"connection: close" in told
        senders.pop().close()
        until(lambda: held.bodies == 900 << 10)
        assert client.ask("/v1/completions", long).status == 200
        stack.close()
        until(lambda: held.bodies == 0)


def test_a_body_of_any_size_is_read_alone() -> None:
    with serving(small_llm(), answers_bytes=1024) as client:
        asked_for = {"prompt": "abc", "max_tokens": 2, "user": "x" * (500 << 10)}
        assert client.ask("/v1/completions", asked_for).status == 200


class Sized(torch.nn.Module):
    """Outputs that grow faster than their input, or not at all."""

    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.grows = grows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, None] @ x[:, None] if self.grows else x.mean(1, keepdim=True)


@pytest.mark.parametrize("grows", [False, True])
def test_what_a_module_gives_counts_by_its_size(grows: bool) -> None:
    model = InferModule(Sized(grows), torch.rand(2, 4), torch.rand(1, 256))
    body = {"inputs": [[1] * 256] * (2 if grows else 200)}  # gives 131,072 numbers, or 200
    with serving_batches(model, answers_bytes=MIB) as client:
        held = client.server.app.held
        held.bytes += MIB - (100 << 10)
        found = client.ask("/v1/infer", body)
        assert found.status == (503 if grows else 200)
        assert not grows or "are made or wait to be read" in found.error["message"]
        until(lambda: held.bytes == MIB - (100 << 10))
        held.bytes = 0
        assert client.ask("/v1/infer", body).status == 200, "alone"


def test_what_a_module_gives_takes_its_outputs_and_a_body() -> None:
    found = InferModule(Net(), torch.zeros(1, 4)).run([{"input": torch.rand(4)}] * 100)
    for kind in (JSON, inference.TENSORS):
        length = len(inference.told_outputs(found, False, kind))
        own = 100 * 12
        assert length + own <= inference.answer_bytes(found, kind) + 200 <= 2 * (length + own)


@pytest.mark.parametrize("which", ["llm", "module"])
def test_only_the_body_is_left_while_it_is_read(which: str, monkeypatch: Any) -> None:
    module, name = {
        "llm": (embedded, "told_embeddings"),
        "module": (batched, "told_outputs"),
    }[which]
    real, reply = getattr(module, name), Exchange.reply
    made, alive = list[Any](), list[int]()

    def told(given: Any, *others: Any) -> bytes:
        tensors = [x for row in given for x in (row.values() if which == "module" else [row])]
        assert all(isinstance(x, torch.Tensor) for x in tensors)
        made.extend(weakref.ref(x) for x in tensors)
        return real(given, *others)

    async def replies(self: Exchange, *given: Any) -> None:
        for _ in range(100):
            if left := sum(x() is not None for x in made):
                await asyncio.sleep(0.005)  # for other threads to let go
        alive.append(left)
        await reply(self, *given)

    monkeypatch.setattr(module, name, told)
    monkeypatch.setattr(Exchange, "reply", replies)
    if which == "llm":
        with serving(small_llm()) as client:
            assert client.ask("/v1/embeddings", {"input": ["a"] * 99}).status == 200
    else:
        with serving_batches(InferModule(Net(), torch.zeros(1, 4))) as client:
            assert client.ask("/v1/infer", {"inputs": [[0] * 4] * 99}).status == 200
    assert len(made) == 99
    assert alive == [0]


def test_an_answer_is_written_as_json() -> None:
    vectors = [torch.tensor([0.1, -2.0]), torch.tensor([1e-30, 3.0])]
    asked_for = Embeddings(["a", "b"], base64=False, truncate=False, dimensions=None)
    found = json.loads(told_embeddings(vectors, asked_for, 'm"', 7))
    assert [x["embedding"] for x in found["data"]] == [x.tolist() for x in vectors]
    assert [x["index"] for x in found["data"]] == [0, 1]
    assert (found["object"], found["model"]) == ("list", 'm"')
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
