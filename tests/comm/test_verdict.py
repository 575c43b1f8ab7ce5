"""Who of ranks that parted is named as odd."""

from __future__ import annotations

import pytest

from lezero.comm.calls import Call, History
from lezero.comm.verdict import parted

EMBED, FIRST, SECOND, OTHER = (
    Call("all_reduce", (4,), "float32", label) for label in ("embed", "first", "second", "other")
)


def told(*calls: Call, steps: int = 3) -> str:
    """What is said of the ranks' `calls` at number 3 of a step, of which some came before."""
    history = History()
    for call in [*[EMBED, FIRST, SECOND] * steps, EMBED, FIRST]:
        history.add(call)
    history.add(calls[0])
    return parted(history.count, dict(enumerate(calls)), history)


def test_of_several_the_minority_is_odd_whatever_the_order_was() -> None:
    text = told(SECOND, OTHER, OTHER)
    assert "rank 0 entered all_reduce of 'second'" in text
    assert "where ranks 1 and 2 entered all_reduce of 'other'" in text


@pytest.mark.parametrize("first", [SECOND, OTHER])
def test_of_two_the_one_that_leaves_the_order_is_odd(first: Call) -> None:
    odd = int(first is SECOND)
    text = told(first, OTHER if first is SECOND else SECOND)
    assert f"rank {odd} entered all_reduce of 'other'" in text
    assert f"where rank {1 - odd} entered all_reduce of 'second'" in text


def test_a_call_that_comes_one_too_early_has_skipped_one() -> None:
    assert "rank 1 entered all_reduce of 'embed' (float32 [4]) and skipped 'second'" in told(
        SECOND, EMBED
    )


def test_without_an_order_the_lowest_rank_is_right() -> None:
    assert "collective 3: rank 1 entered all_reduce of 'other'" in told(SECOND, OTHER, steps=0)
