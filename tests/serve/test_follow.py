"""Several tokens of a request in one call: the same answers, and others get their turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lezero.serve import Drawn, SamplingParams
from lezero.serve.llm import LLM
from lezero.serve.program import Fed
from tests.serve.models import prompts, small
from tests.serve.test_scheduler import request, scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=30)


def opened(tied: bool = True, **settings: Any) -> LLM:
    llm = LLM(small(tied=tied), weights="int8", **settings)
    if not llm.program._decoder.follows:  # type: ignore[attr-defined]
        pytest.skip("no native kernel suits this processor")
    return llm


def counted(llm: LLM, most: int = 8) -> list[tuple[int, int]]:
    """Sequences and steps of each call. most: of steps at once."""
    follow, calls = llm.program.follow, list[tuple[int, int]]()

    def watched(fed: Sequence[Fed], steps: int, asked: Any = None) -> list[list[int]]:
        calls.append((len(fed), steps))
        return follow(fed, steps, asked)

    llm.program.follow = watched  # type: ignore[method-assign]
    llm.program.steps_at_once = lambda *_: most  # type: ignore[method-assign]
    return calls


BY_CHANCE = (
    SamplingParams(max_tokens=30, seed=1),
    SamplingParams(max_tokens=30, seed=2, temperature=0.7, top_p=0.9),
    GREEDY,
    SamplingParams(max_tokens=30, seed=3, temperature=1.5, top_k=9, min_p=0.01),
    SamplingParams(max_tokens=30, temperature=1.0),  # by a seed of its own
)


@pytest.mark.parametrize("blocks", [None, 12])
@pytest.mark.parametrize("together", [1, 7])
@pytest.mark.parametrize("by_chance", [False, True])
def test_answers_are_the_same(by_chance: bool, together: int, blocks: int | None) -> None:
    """blocks: so few that requests are preempted."""
    asked = prompts(together, seed=4)
    room = {} if blocks is None else {"cache_bytes": blocks * opened().program.block_bytes}
    plain, llm = opened(**room), opened(**room)
    assert not counted(plain, most=1)
    calls = counted(llm)
    params = [BY_CHANCE[i % 5] if by_chance else GREEDY for i in range(together)]
    expected = plain.generate(asked, params)
    found = llm.generate(asked, params)
    assert [x.tokens for x in found] == [x.tokens for x in expected]
    assert [x.reason for x in found] == [x.reason for x in expected]
    assert calls
    assert together > 1 or llm.engine.totals.steps == plain.engine.totals.steps
    assert llm.engine.totals.drawn == plain.engine.totals.drawn
    assert llm.engine.totals.drafted == llm.engine.totals.accepted == 0
    llm.engine.scheduler.check()
    assert llm.engine.pool.used_count == 0


def test_an_answer_ends_where_it_ends() -> None:
    prompt = prompts(1, seed=2)[0]
    answer = opened().generate(prompt, GREEDY)[0].tokens
    place = next(i for i in range(9, 30) if answer[i] not in answer[:i])
    asked = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=(answer[place],))
    llm = opened()
    assert counted(llm) == []
    assert llm.generate(prompt, asked)[0].tokens == answer[: place + 1]
    for length in (1, 2, 9):
        short = SamplingParams(temperature=0, max_tokens=length)
        found = llm.generate(prompt, short)[0]
        assert (found.tokens, found.reason) == (answer[:length], "length")


def test_who_wants_more_than_tokens_is_asked_step_by_step() -> None:
    llm = opened()
    calls = counted(llm)
    named = SamplingParams(max_tokens=30, temperature=0, logprobs=1)
    penalized = SamplingParams(max_tokens=30, temperature=1, seed=1, frequency_penalty=0.1)
    for asked in (named, penalized):
        llm.generate(prompts(1)[0], asked)
        assert not calls
        llm.generate(prompts(2), [SamplingParams(max_tokens=20, seed=2), asked])
        assert not calls, "both wait for the one"


def test_chance_alone_finds_out_how_long_a_step_takes() -> None:
    llm = opened()
    llm.generate(prompts(1)[0], SamplingParams(max_tokens=9, temperature=1, seed=1))
    assert llm.program._step_s < 0.02  # type: ignore[attr-defined]
    assert llm.program.steps_at_once(1, True) > 1


def test_what_is_not_finite_ends_its_request_and_keeps_what_it_had() -> None:
    asked = prompts(3, seed=6)
    expected = opened(tied=False).generate(asked, GREEDY)
    others = {token for i in (0, 2) for token in [*asked[i], *expected[i].tokens]}
    answer = expected[1].tokens
    place = next(i for i, token in enumerate(answer) if token not in {*others, *asked[1]})
    llm = opened(tied=False)
    rows: Any = llm.program._embedding.weight  # type: ignore[attr-defined]
    rows.scale[answer[place] // 16, :, answer[place] % 16] = torch.nan
    calls = counted(llm)
    found = llm.generate(asked, GREEDY)
    assert calls
    assert found[1].reason == "error"
    assert found[1].tokens == answer[: place + 1]
    assert [found[i].tokens for i in (0, 2)] == [expected[i].tokens for i in (0, 2)]
    assert calls[-1][0] == 2, "the others go on together"


def test_a_call_takes_no_longer_than_its_share() -> None:
    program: Any = opened().program
    assert program.steps_at_once(1) == 1, "nobody knows yet how long a step takes"
    for step_s, sequences, steps in (
        (1e-4, 1, 8),
        (1e-4, 6, 5),
        (1e-4, 32, 1),
        (0.009, 1, 2),
        (1, 1, 1),
    ):
        program._step_s = step_s
        assert program.steps_at_once(sequences) == steps


def test_the_first_token_is_told_at_once() -> None:
    llm = opened()
    counted(llm)
    for _ in range(2):  # the second time all but its last token lies in the cache
        assert len(next(iter(llm.stream(list(range(17)), GREEDY))).tokens) == 1


def test_a_failure_runs_the_steps_one_by_one(caplog: Any) -> None:
    expected = opened().generate(prompts(3), GREEDY)
    llm = opened()

    def fails(fed: Sequence[Fed], steps: int, asked: Any = None) -> list[list[int]]:
        raise MemoryError

    llm.program.follow = fails  # type: ignore[method-assign]
    found = llm.generate(prompts(3), GREEDY)
    assert [x.tokens for x in found] == [x.tokens for x in expected]
    assert caplog.text.count("steps failed; from here on each is run by itself") == 1


def test_others_get_their_turn_before() -> None:
    plan = scheduler(blocks=6, size=4, requests=2)
    for name in "ab":
        plan.add(request(name, 3, new=12))
    step = plan.schedule()
    plan.update(step, [[Drawn(1)], [Drawn(1)]])
    step = plan.schedule()
    assert plan.room_to_follow(step, 8) == 8  # tokens 3 to 10 of each: three blocks
    assert plan.pool.free_count == 0
    assert plan.room_to_follow(step, 10) == 1
    plan.update(step, [[Drawn(1)], [Drawn(1)]])
    plan.finish(plan.running[1], "cancelled")
    plan.add(request("c", 3))
    step = plan.schedule()
    assert len(step.chunks) == 2
    plan.add(request("d", 3))
    assert plan.room_to_follow(step, 1) == 1
    plan.check()
    plan = scheduler(requests=3)
    plan.add(request("a", 3, new=3))
    plan.update(plan.schedule(), [[Drawn(1)]])
    step = plan.schedule()
    assert plan.room_to_follow(step, 8) == 2, "what it may still get"
    plan.add(request("b", 3))
    assert plan.room_to_follow(step, 8) == 1, "who waits can start"
