"""A step that raises harms the request at fault alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lezero.serve import engine
from lezero.serve.answer import Completion
from lezero.serve.draft import DraftModel
from lezero.serve.embed import Passages
from lezero.serve.llm import LLM
from lezero.serve.paying import WhilePaying
from lezero.serve.program import Fed
from lezero.serve.sampling import SamplingParams
from tests.serve.models import prompts, runs, small

PARAMS = SamplingParams(max_tokens=20, seed=3, logprobs=1)
BAD = 96


def broken(llm: LLM, bad: Callable[[Fed], bool]) -> list[int]:
    """Lets the program raise for what is `bad`; tells how many sequences each call had."""
    run, calls = llm.program.run, []

    def raising(fed: Sequence[Fed]) -> Any:
        calls.append(len(fed))
        if any(bad(one) for one in fed):
            run(fed[:1])  # some of the work is done by then
            raise RuntimeError("a bug in a kernel")
        return run(fed)

    runs(llm.program, raising)
    return calls


def heard(answers: Sequence[Completion]) -> list[object]:
    return [(answer.tokens, answer.reason, answer.logprobs) for answer in answers]


def given() -> list[list[int]]:
    return [[token % BAD for token in prompt] for prompt in prompts(12, longest=60)]


@pytest.mark.parametrize("speculate", ["off", "lookup"])
def test_who_raises_is_found_and_the_others_go_on(speculate: Any, caplog: Any) -> None:
    asked = given()
    asked[4], asked[9] = [BAD, 3, 4], [BAD] * 50
    expected = heard(LLM(small(), weights="bf16").generate(asked, PARAMS))
    llm = LLM(small(), weights="bf16", speculate=speculate)
    calls = broken(llm, lambda one: one.position == 0 and one.tokens[0] == BAD)
    found = llm.generate(asked, PARAMS)
    for answer in (found[4], found[9]):
        assert (answer.reason, answer.tokens) == ("error", [])
        assert "bug" not in str(answer.error)
    for index in set(range(12)) - {4, 9}:
        assert heard(found)[index] == expected[index]
    assert max(calls) == calls[0] > 1
    assert caplog.text.count("a step of the engine failed") == 2
    llm.engine.scheduler.check()
    assert llm.engine.pool.used_count == 0


def test_a_request_that_raises_later_keeps_what_it_had(caplog: Any) -> None:
    asked = given()[:5]
    expected = LLM(small(), weights="bf16").generate(asked, PARAMS)
    llm = LLM(small(), weights="bf16")
    last = len(asked[2]) + 6
    broken(llm, lambda one: one.position == last and one.tokens[0] == expected[2].tokens[6])
    found = llm.generate(asked, PARAMS)
    assert found[2].reason == "error"
    assert found[2].tokens == expected[2].tokens[:7]
    assert heard(found[:2] + found[3:]) == heard(expected[:2] + expected[3:])


def test_what_only_fails_together_harms_nobody(caplog: Any) -> None:
    expected = heard(LLM(small(), weights="bf16").generate(given(), PARAMS))
    llm = LLM(small(), weights="bf16")
    run = llm.program.run

    def crowded(fed: Sequence[Fed]) -> Any:
        if len(fed) > 3:
            raise MemoryError
        return run(fed)

    runs(llm.program, crowded)
    assert heard(llm.generate(given(), PARAMS)) == expected


def test_a_failed_guess_harms_nobody(caplog: Any) -> None:
    expected = heard(LLM(small(), weights="bf16").generate(given(), PARAMS))
    llm = LLM(small(), weights="bf16", speculate="draft", draft=small())
    assert llm._draft is not None

    def fails(fed: Sequence[Fed]) -> Any:
        raise RuntimeError("a bug in the draft")

    llm._draft.run = fails  # type: ignore[method-assign]
    assert heard(llm.generate(given(), PARAMS)) == expected
    assert "guessing failed" in caplog.text


def fails_at(nth: int, drafter: DraftModel) -> list[int]:
    """Lets a pass of the draft raise; tells how many of its blocks were held at each."""
    run, used = drafter.program.run, list[int]()

    def counted(fed: Sequence[Fed]) -> Any:
        used.append(drafter.pool.used_count)
        if len(used) == nth:
            raise RuntimeError("a bug in the draft")
        return run(fed)

    drafter.program.run = counted  # type: ignore[method-assign]
    return used


def test_a_guess_that_fails_lets_go_of_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is logged holds the error, and thus the frames that it came through.
    monkeypatch.setattr(engine._LOG, "error", lambda *_, **__: None)
    expected = heard(LLM(small(), weights="bf16").generate(given(), PARAMS))
    llm = LLM(small(), weights="bf16", speculate="draft", draft=small())
    drafter, program = llm._drafter, llm._draft
    assert drafter is not None
    assert program is not None
    llm.engine._speculator = WhilePaying(drafter, lambda: 0.0)  # the clock has no say
    used = fails_at(5, drafter)
    assert heard(llm.generate(given(), PARAMS)) == expected
    assert len(used) == 5
    assert used[-1] > 0
    assert drafter.pool.used_count == 0
    assert not drafter._followers
    drafter.pool.check([])
    assert (llm._drafter, llm._draft) == (None, None)
    assert llm.forecast.draft_bytes == 0
    kept = weakref.ref(program)
    del drafter, program
    gc.collect()
    assert kept() is None, "nobody asks the draft any more, so its weights and cache go"
    assert heard(llm.generate(given(), PARAMS)) == expected


def test_a_draft_that_cannot_even_close_harms_nobody(caplog: Any) -> None:
    expected = heard(LLM(small(), weights="bf16").generate(given(), PARAMS))
    llm = LLM(small(), weights="bf16", speculate="draft", draft=small())
    drafter: Any = llm._drafter

    def fails(*_: Any) -> Any:
        raise AssertionError("a block was given back twice")

    drafter.guess = drafter.close = fails
    assert heard(llm.generate(given(), PARAMS)) == expected
    assert "guessing failed" in caplog.text


def test_a_model_works_while_embeddings_hold_the_whole_cache() -> None:
    size = LLM(small(), weights="bf16").program.block_bytes
    llm = LLM(small(), weights="bf16", cache_bytes=6 * size)
    pool = llm.engine.pool
    going = Passages(llm.engine, [[1] * (pool.count * pool.block_size)])
    run, ran = llm.program.states, []

    def asked(fed: Sequence[Fed]) -> Any:
        ran.append(pool.free_count)
        assert llm.engine.works()  # of a step that failed meanwhile
        return run(fed)

    llm.program.states = asked  # type: ignore[method-assign]
    while not going.step():
        pass
    assert ran[0] == pool.used_count == 0
    broken(llm, lambda one: True)
    assert not llm.engine.works()
    assert pool.used_count == 0
