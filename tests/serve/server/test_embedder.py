"""Long texts that are embedded beside answers and beside other texts, a pass at a time."""

from __future__ import annotations

from typing import Any

import pytest

from lezero.serve.llm import LLM
from lezero.serve.sampling import SamplingParams
from lezero.serve.server.embedder import Embedder, Embedding, EngineError
from lezero.serve.server.metrics import Metrics
from tests.serve.models import prompts, small

LONG = [number % 97 for number in range(1500)]
SHORT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=30, seed=4)


def engine_for(blocks: int | None = None) -> LLM:
    llm = LLM(small(context=2048), weights="bf16")
    if blocks is None:
        return llm
    room = blocks * llm.program.block_bytes
    return LLM(small(context=2048), weights="bf16", cache_bytes=room)


def lists(told: dict[int, Any]) -> dict[int, Any]:
    return {number: [x.tolist() for x in vectors] for number, vectors in told.items()}


def added(embedder: Embedder, *each: list[list[int]]) -> tuple[list[Embedding], dict[int, Any]]:
    told: dict[int, Any] = {}

    def tells(number: int) -> Any:
        return lambda outcome: told.setdefault(number, outcome)

    asked = [Embedding(given, tells(number)) for number, given in enumerate(each)]
    for one in asked:
        embedder.add(one)
    return asked, told


def test_a_step_is_one_pass_and_a_short_text_does_not_wait_for_a_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = engine_for()
    expected = llm.embed([LONG]), llm.embed([SHORT, SHORT])
    passes, states = [], llm.program.states
    monkeypatch.setattr(llm.program, "states", lambda fed: passes.append(fed) or states(fed))
    embedder = Embedder(llm.engine, Metrics())
    _, told = added(embedder, [LONG], [SHORT, SHORT])
    steps = 0
    while embedder.busy:
        assert embedder.step() is None
        steps += 1
        assert len(passes) == steps
    assert list(told) == [1, 0]
    assert lists(told) == dict(enumerate(expected))
    assert llm.engine.pool.used_count == 0


@pytest.mark.parametrize("blocks", [94, 100])
def test_texts_that_take_all_room_and_answers_end_and_are_the_same_as_alone(blocks: int) -> None:
    free = engine_for()
    given = prompts(3)
    expected, plain = free.embed([LONG, SHORT]), free.generate(given, PARAMS)
    llm = engine_for(blocks)
    requests = [llm.request(prompt, PARAMS) for prompt in given]
    for request in requests:
        llm.engine.add(request)
    llm.engine.step()
    embedder = Embedder(llm.engine, Metrics())
    _, told = added(embedder, [LONG], [SHORT], [LONG, SHORT])
    while embedder.busy or llm.engine.busy:
        llm.engine.step()
        if embedder.busy:
            assert embedder.step() is None
    assert lists(told) == {0: expected[:1], 1: expected[1:], 2: expected}
    assert [request.answer for request in requests] == [answer.tokens for answer in plain]
    llm.engine.scheduler.check()
    assert llm.engine.pool.used_count == 0


def test_texts_without_end_do_not_starve_an_answer() -> None:
    llm = engine_for(94)
    prompt = LONG[:600]  # takes several steps before its first token
    plain = engine_for().generate([prompt], PARAMS.model_copy(update={"max_tokens": 3}))
    request = llm.request(prompt, PARAMS.model_copy(update={"max_tokens": 3}))
    embedder = Embedder(llm.engine, Metrics())
    embedded = 0

    def again(outcome: Any) -> None:
        nonlocal embedded
        embedded += isinstance(outcome, list)
        embedder.add(Embedding([LONG], again))

    for _ in range(2):
        embedder.add(Embedding([LONG], again))
    llm.engine.add(request)
    for _ in range(100):
        llm.engine.step()
        if request.reason is not None:
            break
        assert embedder.step() is None
    assert request.answer == plain[0].tokens
    assert request.preemptions <= 3, "more than once for each token"
    assert embedded >= 2, "texts starve"


@pytest.mark.parametrize("drops", [True, False])
def test_a_text_that_is_given_up_midway_leaves_nothing(drops: bool) -> None:
    llm = engine_for()
    embedder = Embedder(llm.engine, Metrics())
    (asked,), told = added(embedder, [LONG])
    embedder.step()
    assert llm.engine.pool.used_count > 0
    if drops:
        embedder.drop(asked)
    else:
        embedder.end(EngineError("the end"))
    assert bool(told) is not drops
    assert llm.engine.pool.used_count == 0
    assert not embedder.busy


def test_who_runs_is_counted_until_his_end(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine_for()
    embedder = Embedder(llm.engine, Metrics())
    (first, *_), told = added(embedder, [LONG], [SHORT], [LONG])
    assert embedder.running == 0
    embedder.step()
    assert embedder.running == 1
    embedder.step()
    embedder.step()
    assert (embedder.running, list(told)) == (2, [1])
    embedder.drop(first)
    assert embedder.running == 1
    embedder.end(EngineError("over"))
    assert embedder.running == 0
    added(embedder, [SHORT])
    monkeypatch.setattr(llm.program, "states", lambda fed: 1 / 0)
    assert isinstance(embedder.step(), ZeroDivisionError)
    assert embedder.running == 0
