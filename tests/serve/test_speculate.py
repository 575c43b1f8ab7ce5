"""Guesses by what came before, and their part of a step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from lezero.serve.blocks import BlockPool
from lezero.serve.paying import WhilePaying
from lezero.serve.request import Request, State
from lezero.serve.sampling import Drawn, SamplingParams
from lezero.serve.scheduler import Scheduler
from lezero.serve.speculate import PromptLookup
from tests.serve.test_scheduler import fed, request, run, scheduler


def test_the_longest_run_counts_and_of_equals_the_last() -> None:
    lookup = PromptLookup(drafts=2, longest=3)
    texts = {
        (1, 2, 3, 7, 8, 9, 2, 3, 4, 5, 1, 2, 3): (7, 8),
        (1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3): (8, 1),
        (1, 2, 3, 1): (),
    }
    requests = [Request(str(text), list(text)) for text in texts]
    lookup.guess(requests)
    assert [request.drafts for request in requests] == list(texts.values())


def test_requests_that_left_are_forgotten() -> None:
    lookup = PromptLookup()
    for number in range(20):
        asked = Request(str(number), [1, 2, 3, 1, 2])
        lookup.guess([asked])
        asked.state = State.FINISHED
    assert len(lookup._places) == 1
    lookup.guess(())
    assert not lookup._places


class _Read(list[int]):
    """Tokens that count how often they are asked for."""

    times = 0

    def __getitem__(self, place: Any) -> Any:
        self.times += 1
        return super().__getitem__(place)


def test_a_text_is_read_once_where_guessing_pauses() -> None:
    now = [0.0]
    gate = WhilePaying(PromptLookup(), lambda: now[0])
    asked = Request("a", list(range(500)) * 2)
    asked.tokens = read = _Read(asked.tokens)
    guessed = []
    for step in range(300):
        gate.guess([asked])
        guessed.append(bool(asked.drafts))
        now[0] += 9.0 if asked.drafts else 1.0  # it does not pay
        gate.checked(1, False)
        read.append(step % 500)
        read.times *= step > 0
    again = sum(not a and b for a, b in pairwise(guessed))
    assert again > 0
    assert read.times < 4 * len(guessed)


def test_what_became_of_a_text_in_a_pause_is_found() -> None:
    lookup, asked = PromptLookup(drafts=2), Request("a", [1, 2, 3, 4])
    lookup.guess([asked])
    lookup.guess(())
    asked.tokens += [5, 6, 7, 8, 5, 6]
    lookup.guess([asked])
    assert asked.drafts == (7, 8)


def test_guesses_leave_prompts_most_of_a_step() -> None:
    plan = scheduler(room=16, requests=4)
    a, b = request("a", 1, new=20), request("b", 1, new=20)
    for item in (a, b):
        plan.add(item)
    run(plan)
    for item in (a, b):
        item.drafts = [1] * 7
    assert fed(plan.schedule()) == [("a", 1, 8), ("b", 1, 8)]
    plan.add(c := request("c", 30))
    for item in (a, b):
        item.drafts = [1] * 7
    assert run(plan) == [("a", 1, 3), ("b", 1, 1), ("c", 0, 12)]
    for item in (a, b):
        item.drafts = [1] * 7
    assert run(plan) == [("a", 2, 2), ("b", 2, 1), ("c", 12, 13)]
    assert c.state is State.RUNNING


def test_an_error_behind_guesses_takes_none_of_them_away() -> None:
    guessed = [Drawn(5), Drawn(6), Drawn(-1, error="NaN")]
    for ends, reason, error in (((), "error", "NaN"), ((6,), "stop", None)):
        plan = Scheduler(BlockPool(20, 4), 16, 4, 64)
        one = Request("a", [7] * 5, SamplingParams(max_tokens=9, stop_token_ids=ends))
        plan.add(one)
        plan.update(plan.schedule(), [[Drawn(1)]])
        one.drafts = (5, 6)
        assert plan.update(plan.schedule(), [guessed]) == [one]
        assert (one.answer, one.reason, one.error) == ([1, 5, 6], reason, error)
        plan.check()
        shared = plan.pool.match(Request("b", [7] * 5, SamplingParams()))
        assert bool(shared) == (error is None)
