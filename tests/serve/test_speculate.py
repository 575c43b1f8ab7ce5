"""Guesses by what came before, and their part of a step."""

from __future__ import annotations

from lezero.serve.request import Request, State
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
        lookup.guess([Request(str(number), [1, 2, 3, 1, 2])])
    assert len(lookup._places) == 1


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
