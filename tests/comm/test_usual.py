"""What is to be expected: all of a steady loop, and of ranks that part at most what one does."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence

import pytest

from lezero.comm import usual
from lezero.comm.usual import Usual

BLOCKS = range(1, 13)
END, EVALUATION, LOG = 100, 101, 102


def sharded(_: int) -> list[int]:
    """Stage 3: in forward and in backward the same gathers have other calls behind them."""
    back = [call for block in reversed(BLOCKS) for call in (block, 20 + block)]
    return [*BLOCKS, *back, END]


def accumulated(_: int) -> list[int]:
    return [*BLOCKS] * 4 + [END]


def with_events(step: int) -> list[int]:
    return [*BLOCKS, *[LOG] * (step % 2), *[EVALUATION] * (step % 3 == 0)]


def shared_block(_: int) -> list[int]:
    return [1] * 12 + [1, 2] * 12 + [END]


def unexpected(expects: Usual, calls: Sequence[int]) -> int:
    return sum(not expects.take(call) for call in calls)


@pytest.mark.parametrize("loop", [sharded, accumulated, with_events, shared_block])
def test_a_steady_loop_is_all_expected_once_its_first_256_calls_are_over(loop) -> None:
    expects = Usual()
    first = [unexpected(expects, loop(step)) for step in range(60)]
    assert first[0] > 0
    assert not any(first[40:])
    assert sum(first[1:]) < 0.2 * sum(len(loop(step)) for step in range(20)), "few before that"


def test_an_evaluation_now_and_then_is_unexpected_and_the_loop_around_it_is_not() -> None:
    expects = Usual()
    for step in range(40):
        unexpected(expects, sharded(step))
    found = [
        unexpected(expects, [*sharded(step), *[EVALUATION] * (step in (7, 31, 90, 108))])
        for step in range(120)
    ]
    assert found[31] == found[90] == found[108] == 1
    assert sum(found) < 25


def drawn(seed: int) -> Iterator[int]:
    source = random.Random(seed)
    while True:
        loop = source.choice([sharded, accumulated, with_events, shared_block])
        for step in range(source.randint(1, 12)):
            yield from loop(step)
            if source.random() < 0.2:
                yield source.choice([LOG, EVALUATION])


@pytest.mark.parametrize("seed", range(4))
def test_where_ranks_part_at_most_one_of_them_does_what_is_expected(seed: int) -> None:
    expects, source = Usual(), random.Random(seed)
    for _, call in zip(range(3000), drawn(seed), strict=False):
        if source.random() < 0.2:
            others = source.sample([*BLOCKS, 21, 22, END, LOG, EVALUATION], 3)
            there = [copy.copy(expects) for _ in others]  # of the tables one is enough
            for one in there:
                one._far, one._near = dict(expects._far), dict(expects._near)
            assert sum(one.take(kind) for one, kind in zip(there, others, strict=True)) <= 1
        expects.take(call)


def test_the_tables_have_a_bound(monkeypatch) -> None:
    monkeypatch.setattr(usual, "_PLACES", 50)
    expects, source = Usual(), random.Random(0)
    for _ in range(2000):
        expects.take(source.randint(1, 40))
        assert max(len(expects._far), len(expects._near)) <= 50
    unexpected(expects, [1, 2, 3] * 300)
    assert unexpected(expects, [1, 2, 3]) == 0
