"""Guesses by what came before."""

from __future__ import annotations

from lezero.serve.request import Request
from lezero.serve.speculate import PromptLookup


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
