import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lezero.core.errors import ConfigError
from lezero.serve import BlockPool, Request


def ran(pool: BlockPool, tokens: list[int], salt: str = "") -> Request:
    """A request whose tokens are all in the cache."""
    request = Request("r", tokens, salt=salt)
    found = pool.match(request)
    pool.share(found)
    request.blocks = found + pool.allocate(pool.blocks_for(len(tokens)) - len(found))
    request.computed, request.published = len(tokens), len(found)
    pool.publish(request)
    return request


def test_the_longest_run_of_full_blocks_is_found() -> None:
    pool = BlockPool(10, 4)
    first = ran(pool, list(range(10)))
    assert pool.match(Request("b", [*range(8), 99])) == first.blocks[:2]
    assert pool.match(Request("b", [*range(4), 99, 5, 6, 7, 8])) == first.blocks[:1]
    assert pool.match(Request("b", [99, *range(1, 10)])) == []
    assert pool.match(Request("b", [*range(4, 10)])) == []  # the same tokens, elsewhere


def test_without_sharing_nothing_is_found() -> None:
    pool = BlockPool(10, 4, shares=False)
    first = ran(pool, list(range(10)))
    assert pool.match(Request("b", list(range(10)))) == []
    pool.release(first.blocks)
    assert pool.match(Request("b", list(range(10)))) == []
    pool.check([])


def test_one_token_is_left_to_compute() -> None:
    pool = BlockPool(10, 4)
    first = ran(pool, list(range(8)))
    assert pool.match(Request("b", list(range(8)))) == first.blocks[:1]
    assert pool.match(Request("b", list(range(9)))) == first.blocks


def test_what_is_not_computed_has_no_name() -> None:
    pool = BlockPool(10, 4)
    request = Request("a", list(range(12)))
    request.blocks, request.computed = pool.allocate(3), 7
    pool.publish(request)
    assert pool.match(Request("b", list(range(12)))) == request.blocks[:1]


def test_salt_keeps_requests_apart() -> None:
    pool = BlockPool(10, 4)
    first = ran(pool, list(range(8)), salt="key 1")
    assert pool.match(Request("b", list(range(9)))) == []
    assert pool.match(Request("b", list(range(9)), salt="key 2")) == []
    assert pool.match(Request("b", list(range(9)), salt="key 1")) == first.blocks


def test_equal_names_of_other_tokens_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lezero.serve.blocks._digest", lambda data: b"the same for all")
    pool = BlockPool(10, 2)
    first = ran(pool, [1, 2])
    assert pool.match(Request("b", [3, 4, 5])) == []
    assert pool.match(Request("b", [1, 2, 5])) == first.blocks
    ran(pool, [3, 4])
    pool.check()


def test_free_blocks_are_found_until_their_room_is_needed() -> None:
    pool = BlockPool(4, 2)
    first = ran(pool, [1, 2, 3, 4])
    blocks = list(first.blocks)
    pool.release(first.blocks)
    assert pool.free_count == 4
    again = pool.match(Request("b", [1, 2, 3, 4, 5]))
    assert again == blocks
    pool.share(again)
    assert pool.used_count == 2
    pool.release(again)
    pool.allocate(2)  # blank ones go first
    assert pool.match(Request("b", [1, 2, 3, 4, 5])) == blocks
    pool.allocate(1)  # then the end of the least recently used
    assert pool.match(Request("b", [1, 2, 3, 4, 5])) == blocks[:1]
    pool.allocate(1)
    assert pool.match(Request("b", [1, 2, 3, 4, 5])) == []
    pool.check()


def test_the_least_recently_used_goes_first() -> None:
    pool = BlockPool(4, 2)
    old, new = ran(pool, [1, 2, 3, 4]), ran(pool, [5, 6, 7, 8])
    pool.release(old.blocks)
    pool.release(new.blocks)
    used = pool.match(Request("b", [1, 2, 3, 4, 9]))
    pool.share(used)
    pool.release(used)
    pool.allocate(2)
    assert pool.match(Request("b", [1, 2, 3, 4, 9])) == old.blocks
    assert pool.match(Request("b", [5, 6, 7, 8, 9])) == []


def test_shared_blocks_are_free_when_the_last_gives_them_back() -> None:
    pool = BlockPool(6, 2)
    first, second = ran(pool, [1, 2, 3, 4, 5]), ran(pool, [1, 2, 3, 4, 6])
    assert first.blocks[:2] == second.blocks[:2]
    pool.check([first.blocks, second.blocks])
    assert pool.used_count == 4
    pool.release(first.blocks)
    assert pool.used_count == 3
    pool.release(second.blocks)
    assert pool.free_count == 6


def test_forgotten_blocks_are_not_found() -> None:
    pool = BlockPool(6, 2)
    first = ran(pool, [1, 2, 3, 4, 5])
    pool.forget(first.blocks[:1])
    assert pool.match(Request("b", [1, 2, 3, 4, 5])) == []
    pool.release(first.blocks)
    pool.forget(first.blocks)
    pool.check([])


def test_blocks_that_were_ever_held_are_counted() -> None:
    pool, counts = BlockPool(10, 4), []
    for count in (3, 2, 4):
        blocks = pool.allocate(count)
        counts.append(pool.touched_count)
        pool.release(blocks)
    assert counts == [3, 3, 4]


def test_misuse_is_an_assertion() -> None:
    pool = BlockPool(2, 2)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="0 are free"):
        pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.release(blocks)


def test_a_leak_is_noticed() -> None:
    pool = BlockPool(3, 2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])


@pytest.mark.parametrize(("count", "size", "says"), [(0, 4, "count: got 0"), (4, 0, "block_size")])
def test_bad_sizes_are_named(count: int, size: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        BlockPool(count, size)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_random_use_keeps_the_books(seed: int) -> None:
    chance = random.Random(seed)
    pool = BlockPool(12, 3)
    held: list[Request] = []
    for _ in range(60):
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 16))]
        found = pool.match(Request("m", tokens))
        assert len(found) <= (len(tokens) - 1) // 3
        if pool.blocks_for(len(tokens)) <= pool.free_count and chance.random() < 0.6:
            held.append(ran(pool, tokens))
        elif held:
            pool.release(held.pop(chance.randrange(len(held))).blocks)
        elif found:
            pool.forget(found)
        pool.check([request.blocks for request in held])


def test_policy_needs_no_torch() -> None:
    code = (
        "import sys, lezero.serve.scheduler, lezero.serve.blocks, lezero.serve.stop_strings\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
