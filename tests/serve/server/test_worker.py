"""What goes wrong in one request, or in a step, and what the others notice of it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

from lezero.core.errors import LeZeroError
from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from lezero.serve.server import app
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.metrics import Metrics
from lezero.serve.server.run import Server
from lezero.serve.server.worker import Event, Worker
from tests.serve.models import runs, small
from tests.serve.server.running import Client, coder, serving, small_llm, until

POISON = 200
"""A token whose embedding is not a number."""
PARAMS: dict[str, Any] = {
    "temperature": 0.8, "top_k": 20, "max_tokens": 24, "seed": 7, "logprobs": 1, "ignore_eos": True,
}  # fmt: skip


def poisoned_llm(**options: Any) -> LLM:
    model = small(vocab=257, context=512, tied=False)
    with torch.no_grad():
        model.embed_tokens.weight[POISON] = float("nan")
        model.lm_head.weight[POISON] = 0  # and so it is hardly ever drawn
    given = {"weights": "bf16", "cache_bytes": 1 << 20, "coder": coder(), **options}
    return LLM(model, **given)


def prompts(count: int) -> list[list[int]]:
    drawn = random.Random(5)
    return [[drawn.randrange(99) for _ in range(drawn.randrange(1, 80))] for _ in range(count)]


def alone(given: list[list[int]]) -> list[tuple[str, list[float]]]:
    """Answers of an engine that is asked for one at a time, and their log-probabilities."""
    llm, found = poisoned_llm(), []
    for prompt in given:
        (answer,) = llm.generate([prompt], SamplingParams(**PARAMS))
        assert answer.logprobs is not None
        assert answer.reason == "length", "this answer draws poison; take another seed"
        found.append((answer.text, [entry.logprob for entry in answer.logprobs]))
    return found


def answer(client: Client, prompt: list[int]) -> tuple[str, list[float]]:
    found = client.complete(prompt, **PARAMS)
    assert found.status == 200, found.body
    (choice,) = found.json["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def together(client: Client, given: list[list[int]], poison: Any) -> list[Any]:
    """The answers while `poison(client)` runs again and again in two threads."""
    found: list[Any] = [None] * len(given)
    ended = threading.Event()

    def one(number: int) -> None:
        found[number] = answer(client, given[number])

    def trouble() -> None:
        while not ended.is_set():
            poison(client)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(given))]
    troubles = [threading.Thread(target=trouble) for _ in range(2)]
    for thread in [*troubles, *threads]:
        thread.start()
    for thread in threads:
        thread.join(30)
    ended.set()
    for thread in troubles:
        thread.join(30)
    return found


def not_a_number(client: Client) -> None:
    found = client.complete([1, 2, POISON, 3], max_tokens=4)
    assert found.status == 500
    assert found.error["code"] == "engine_error"


def test_logits_that_are_no_numbers_harm_no_other() -> None:
    given = prompts(12)
    expected = alone(given)
    with serving(poisoned_llm()) as client:
        assert together(client, given, not_a_number) == expected
        assert client.ask("/health").status == 200


def test_a_step_that_fails_ends_the_request_at_fault_alone(caplog) -> None:
    llm = poisoned_llm()
    run = llm.program.run

    def broken(fed: Any) -> Any:
        if any(one.position == 0 and one.tokens[0] == 99 for one in fed):
            raise RuntimeError("a bug in a kernel")
        return run(fed)

    def poison(client: Client) -> None:
        found = client.complete([99, 1], max_tokens=4)
        assert found.status == 500
        assert "bug" not in found.error["message"]

    runs(llm.program, broken)
    given = prompts(6)
    expected = alone(given)
    with serving(llm) as client:
        assert together(client, given, poison) == expected
        assert client.ask("/health").status == 200
        assert client.server.metrics.failed_steps > 0
    assert "a step of the engine failed" in caplog.text


def test_a_server_whose_model_fails_at_once_does_not_start(caplog) -> None:
    llm = poisoned_llm()

    def broken(fed: Any) -> Any:
        raise RuntimeError("a bug in a kernel")

    runs(llm.program, broken)
    with pytest.raises(LeZeroError, match="not give even one token"):
        Server(llm, ServeConfig(port=0)).run()


def test_an_engine_that_always_fails_is_not_healthy(caplog) -> None:
    llm = poisoned_llm()

    def broken(fed: Any) -> Any:
        raise RuntimeError("a bug in a kernel")

    with serving(llm) as client:
        runs(llm.program, broken)
        assert client.complete("x").status == 500
        until(lambda: client.server.worker.broken is not None)
        assert client.ask("/health").status == 503
        assert client.ask("/ready").status == 503
        assert client.complete("x").status == 503


def test_a_step_that_does_not_end_is_not_healthy(monkeypatch) -> None:
    llm, gate = poisoned_llm(), threading.Event()
    run = llm.program.run
    with serving(llm) as client:
        runs(llm.program, lambda fed: gate.wait(20) and run(fed))
        monkeypatch.setattr(app, "_STALLED_S", 0.05)
        with client.begin({"prompt": [1, 2], "max_tokens": 1}) as connection:
            until(lambda: client.ask("/health").status == 503)
            assert client.ask("/health").json == {"status": "stalled"}
            gate.set()
            assert connection.recv(20).startswith(b"HTTP/1.1 200 ")
        until(lambda: client.ask("/health").status == 200)


def test_a_loop_that_fails_tells_those_who_wait(monkeypatch, caplog) -> None:
    with serving(poisoned_llm()) as client:

        def fails() -> bool:
            raise KeyError("a bug")

        monkeypatch.setattr(client.server.worker, "_is_time", fails)
        assert client.complete([1, 2], max_tokens=4, ignore_eos=True).status == 500
        assert client.ask("/health").status == 503
        assert client.complete([1, 2], max_tokens=4).status == 503
    assert "the engine's loop failed" in caplog.text


def test_a_text_that_fails_harms_no_other(caplog) -> None:
    llm = poisoned_llm()
    assert llm.coder is not None
    inner = llm.coder._inner

    class Sometimes:
        def encode(self, text: str) -> list[int]:
            return inner.encode(text)

        def decode(self, tokens: list[int]) -> str:
            if tokens[:2] == [77, 78]:
                raise ValueError("a bug in a tokenizer")
            return inner.decode(tokens)

    llm.coder._inner = Sometimes()
    with serving(llm) as client:
        assert client.complete([77, 78], max_tokens=8).status == 500
        assert client.complete([79, 78], max_tokens=8, temperature=0).status == 200
        until(lambda: client.server.worker.active == 0)


class Panic(BaseException):
    """As tokenizers raises it, which is no Exception."""


@pytest.mark.parametrize("where", ["of the prompt", "of the answer", "of the text"])
def test_a_panic_of_a_tokenizer_harms_no_other(where: str, caplog) -> None:
    llm, raised = small_llm(), threading.Event()
    assert llm.coder is not None
    inner = llm.coder._inner

    class Panics:
        def encode(self, text: str) -> list[int]:
            if where == "of the text" and text == "bad":
                raise Panic("of Rust")
            return inner.encode(text)

        def decode(self, tokens: list[int]) -> str:
            long = len(tokens) > 3 if where == "of the answer" else len(tokens) == 3
            if tokens[:3] == list(b"bad") and long and where != "of the text":
                raised.set()
                raise Panic("of Rust")
            return inner.decode(tokens)

    llm.coder._inner = Panics()
    with serving(llm) as client:
        worker = client.server.worker
        for _ in range(2):
            found = client.complete("bad", max_tokens=8, ignore_eos=True)
            assert found.status == 500
            assert found.error["type"] == "server_error"
        assert raised.is_set() == (where != "of the text")
        until(lambda: worker.active == 0)
        assert client.complete("good", max_tokens=8).status == 200
        assert client.ask("/health").status == 200


@pytest.mark.parametrize("seconds", [8.0])
def test_soak(seconds: float) -> None:
    """Mixed load with clients that leave and poison; none wrong, none leaked."""
    given = prompts(10)
    expected = alone(given)
    counts: Counter[str] = Counter()
    with serving(poisoned_llm(max_requests=6, speculate="lookup"), queue=64) as client:
        end = time.monotonic() + seconds
        threads = [
            threading.Thread(target=load, args=(client, given, expected, counts, end, seed))
            for seed in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 20)
        assert client.ask("/health").status == 200
        until(lambda: client.server.worker.active == 0)
        assert client.server.llm.engine.pool.used_count == 0
    print(counts)
    assert counts["wrong"] == 0
    assert min(counts["asked"], counts["left"], counts["poisoned"]) > 0


counted = threading.Lock()


def load(client: Client, given: Any, expected: Any, counts: Any, end: float, seed: int) -> None:
    drawn = random.Random(seed)
    while time.monotonic() < end:
        number, kind = drawn.randrange(len(given)), drawn.random()
        wrong = False
        if kind < 0.6:
            done, wrong = "asked", answer(client, given[number]) != expected[number]
        elif kind < 0.8:
            data = {"prompt": given[number], "max_tokens": 200, "stream": drawn.random() < 0.5}
            with client.begin(data):
                time.sleep(drawn.random() * 0.05)
            done = "left"
        elif kind < 0.9:
            done, wrong = "poisoned", client.complete([POISON], max_tokens=2).status != 500
        else:
            body = drawn.choice([b"{", b"\xff", b"[" * 10000, b'{"prompt": "x", "n": -1}'])
            done, wrong = "poisoned", client.ask("/v1/completions", body).status != 400
        with counted:  # after the answer: an addition that waits for one loses what others add
            counts.update({done: 1, "wrong": int(wrong)})


def test_tokens_of_quick_steps_go_together(monkeypatch) -> None:
    """First and last ones go at once, and the others wait, here for ever."""
    monkeypatch.setattr("lezero.serve.server.worker._TOGETHER_S", 1e9)
    asked = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, "stream": True}
    llm, sent = small_llm(), []
    with serving(llm) as client:
        worker = client.server.worker
        send = worker._send
        monkeypatch.setattr(worker, "_send", lambda: (sent.append(len(worker._out)), send()))
        found = client.ask("/v1/completions", asked).body
    assert found.count(b'"text"') > 90
    assert found.rstrip().endswith(b"[DONE]")
    assert [count for count in sent if count] == [1, 99]


@pytest.mark.parametrize("at_once", [1, 8])
def test_steps_in_one_call_count_as_each_alone(at_once: int) -> None:
    llm = LLM(small(), weights="int8")
    if not llm.program._decoder.follows:  # type: ignore[attr-defined]
        pytest.skip("no native kernel suits this processor")
    llm.program.steps_at_once = lambda *_: at_once  # type: ignore[method-assign]
    likeliest = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    drawn = SamplingParams(temperature=1, seed=1, max_tokens=50, ignore_eos=True)
    penalized = drawn.model_copy(update={"frequency_penalty": 0.5})  # a call a step: not tried so

    async def ask() -> Worker:
        worker = Worker(llm, Metrics(), 8)
        worker.start()
        asked = [*[likeliest] * 3, drawn, penalized]
        for prompt, params in zip(([5, 6], [7, 8, 9], [3, 4], [1, 2], [6]), asked, strict=True):
            worker.reserve(1)
            events: asyncio.Queue[Event] = asyncio.Queue()
            worker.submit([llm.request(prompt, params)], events, 0.0)
            while (await events.get()).reason is None:
                pass
        await worker.stop()
        return worker

    worker = asyncio.run(ask())
    assert worker.paces.alone.tokens == 3 * 49
    assert worker.paces.drawn.tokens == 49
    assert sum(worker.metrics.between_tokens_s.counts) == 5 * 49
    assert llm.engine.totals.steps == 5 * 50
