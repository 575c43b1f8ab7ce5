import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lezero.core.errors import ConfigError
from lezero.serve import BlockPool, Drawn, Request, SamplingParams, Scheduler, State, Step
from tests.serve.plain_engine import END, PlainEngine, guess, plain_answer


def scheduler(
    blocks: int = 100, size: int = 4, room: int = 16, requests: int = 8, longest: int = 200,
    beside: int | None = None,
) -> Scheduler:  # fmt: skip
    sizes, clock = (room, requests, longest), itertools.count().__next__
    return Scheduler(BlockPool(blocks, size), *sizes, clock, most_beside=beside)


def request(name: str, prompt: int | list[int], new: int = 4, **fields: int) -> Request:
    tokens = prompt if isinstance(prompt, list) else [ord(name) % 200] * prompt
    return Request(name, tokens, SamplingParams(max_tokens=new, ignore_eos=True), **fields)


def fed(step: Step) -> list[tuple[str, int, int]]:
    return [(chunk.request.id, chunk.start, chunk.count) for chunk in step.chunks]


def run(plan: Scheduler, token: int = 1) -> list[tuple[str, int, int]]:
    """One step in which each request that samples gets `token`."""
    step = plan.schedule()
    plan.update(step, [[Drawn(token)] if chunk.samples else [] for chunk in step.chunks])
    plan.check()
    return fed(step)


def test_decodes_come_first_and_prompts_fill_the_rest_in_chunks() -> None:
    plan = scheduler(room=24, beside=16)
    plan.add(request("a", 27))
    assert run(plan) + run(plan) == [("a", 0, 24), ("a", 24, 3)]
    plan.add(request("b", 20))
    plan.add(request("c", 9))
    assert run(plan) == [("a", 27, 1), ("b", 0, 15)]
    assert run(plan) == [("a", 28, 1), ("b", 15, 5), ("c", 0, 9)]
    assert run(plan) == [("a", 29, 1), ("b", 20, 1), ("c", 9, 1)]


def test_nobody_makes_room_in_vain() -> None:
    plan = scheduler(blocks=6)
    beginning = [9] * 4
    plan.add(request("a", [*beginning, 1]))
    plan.add(request("b", [*beginning, 2]))
    run(plan)
    run(plan)
    assert [r.blocks[0] for r in plan.running] == [plan.running[0].blocks[0]] * 2  # 3 in all
    others = plan.pool.allocate(2)
    plan.make_room(5)
    assert len(plan.running) == 2
    plan.make_room(2)
    assert [r.id for r in plan.running] == ["a"]
    plan.make_room(4)
    assert not plan.running
    plan.pool.release(others)
    plan.check()


def test_a_request_that_made_room_draws_a_token_before_it_does_so_again() -> None:
    plan = scheduler(blocks=6, size=4, room=8)
    plan.add(a := request("a", 12))

    def embeds() -> bool:
        """Whether a text that takes all room found it."""
        plan.make_room(6, once=True)
        if plan.pool.free_count < 6:
            return False
        plan.pool.release(plan.pool.allocate(6))
        return True

    assert run(plan) == [("a", 0, 8)]
    assert embeds()
    assert run(plan) == [("a", 0, 8)]
    assert not embeds()
    assert run(plan) == [("a", 8, 4)]
    assert len(a.answer) == 1
    assert embeds()
    run(plan)
    plan.add(b := request("b", 2, new=1))
    assert not embeds()
    plan.make_room(6)  # whoever must have it gets it
    assert (a.state, b.state, a.preemptions) == (State.WAITING, State.WAITING, 3)
    plan.check()


def test_blocks_that_a_spared_request_shares_make_no_room() -> None:
    plan = scheduler(blocks=6)
    a, b = (request(str(n), [9, 9, 9, 9, n]) for n in (1, 2))
    for item in (a, b):
        plan.add(item)
        run(plan)
    assert a.blocks[0] == b.blocks[0]
    a.made_room = True
    free = plan.pool.free_count
    plan.make_room(free + 2, once=True)  # b alone would free one
    assert b.state is State.RUNNING
    plan.make_room(free + 1, once=True)
    assert (a.state, b.state) == (State.RUNNING, State.WAITING)


def test_priority_comes_before_arrival() -> None:
    plan = scheduler(room=4, requests=4)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -5)):
        plan.add(request(name, 4, new=1, priority=priority))
    assert [run(plan)[0][0] for _ in range(4)] == ["d", "b", "a", "c"]
    assert run(plan) == []


def test_a_long_prompt_is_not_overtaken_by_short_ones() -> None:
    plan = scheduler(blocks=10, size=4, requests=4)
    plan.add(request("a", 16, new=8))
    run(plan)
    plan.add(request("b", 30, new=2))  # 8 blocks; a holds 4 to 6
    plan.add(request("c", 2, new=2))
    for _ in range(20):
        ran = [name for name, _, _ in run(plan)]
        assert "c" not in ran or "b" in ran or plan.running[0].id != "a"
    assert not plan.waiting
    assert not plan.running


def test_the_last_in_turn_is_preempted_and_goes_on_where_it_was() -> None:
    plan = scheduler(blocks=4, size=4, requests=3)
    a, b, c = request("a", 4, new=9), request("b", 4, new=9), request("c", 4, new=1, priority=9)
    plan.add(a)
    plan.add(b)
    run(plan)
    plan.add(c)
    for _ in range(4):
        run(plan)
    assert run(plan)[0] == ("a", 8, 1)
    assert (b.state, b.preemptions, b.blocks, len(b.answer)) == (State.WAITING, 1, [], 5)
    assert plan.waiting == [b, c]  # before those of later turn
    while not a.reason:
        run(plan)
    assert run(plan)[0] == ("b", 4, 5)  # its first block was still found
    assert b.cached == 0  # which nobody had computed before it
    while plan.running or plan.waiting:
        run(plan)
    assert (len(a.answer), len(b.answer), len(c.answer)) == (9, 9, 1)
    assert (a.preemptions, c.preemptions) == (0, 0)


def test_a_step_of_a_preempted_request_is_withdrawn() -> None:
    plan = scheduler(blocks=4, size=4, room=8, requests=2)
    low, high = request("l", 3, new=12, priority=1), request("h", 12, new=2)
    plan.add(low)
    run(plan)
    plan.add(high)
    while high.state is not State.FINISHED:
        assert sum(count for _, _, count in run(plan)) <= 8
    assert low.preemptions == 1
    while low.state is not State.FINISHED:
        run(plan)
    assert len(low.answer) == 12


def test_a_shared_prefix_is_computed_once_also_when_all_come_at_once() -> None:
    plan = scheduler(room=64)
    shared = list(range(32))
    requests = [request(str(n), [*shared, 100 + n, 200 + n]) for n in range(6)]
    for item in requests:
        plan.add(item)
    assert run(plan) == [("0", 0, 34)]
    assert run(plan) == [("0", 34, 1), *((str(n), 32, 2) for n in range(1, 6))]
    assert [item.cached for item in requests] == [0, 32, 32, 32, 32, 32]
    assert plan.pool.used_count == 8 + 6


def test_equal_prompts_share_all_but_the_last_token() -> None:
    plan = scheduler(room=64)
    for name in "ab":
        plan.add(request(name, [1, 2, 3, 4, 5, 6, 7, 8]))
    assert run(plan) == [("a", 0, 8)]
    assert run(plan) == [("a", 8, 1), ("b", 4, 4)]


def test_drafts_are_fed_with_the_last_token_and_taken_back_where_they_are_wrong() -> None:
    plan = scheduler(size=2)
    one = request("a", [7, 7, 7], new=9)
    plan.add(one)
    run(plan, token=1)
    one.drafts = [2, 3, 9, 9]
    step = plan.schedule()
    (chunk,) = step.chunks
    assert (chunk.tokens, chunk.drafts, chunk.known) == ([1, 2, 3, 9, 9], (2, 3, 9, 9), 4)
    assert len(one.blocks) == 4
    plan.update(step, [[Drawn(2), Drawn(3), Drawn(4)]])
    plan.check()
    assert (one.answer, one.computed, one.pending) == ([1, 2, 3, 4], 6, 1)
    assert len(one.blocks) == 3
    assert one.drafts == ()
    # The wrong drafts' block is known to nobody.
    assert plan.pool.match(request("b", [7, 7, 7, 1, 2, 3, 9, 9, 9])) == one.blocks


def test_drafts_leave_every_running_request_a_token_and_end_with_the_answer() -> None:
    plan = scheduler(room=6, requests=3)
    a, b, c = (request(name, 2, new=5) for name in "abc")
    for item in (a, b, c):
        plan.add(item)
    run(plan)
    for item in (a, b, c):
        item.drafts = [1] * 10
    assert fed(plan.schedule()) == [("a", 2, 4), ("b", 2, 1), ("c", 2, 1)]
    plan.cancel(b)
    plan.cancel(c)
    a.drafts = [1] * 10
    assert fed(plan.schedule()) == [("a", 2, 4)]  # 4 tokens are still wanted


@pytest.mark.parametrize(
    ("blocks", "expected"), [(4, [("a", 4, 4), ("b", 4, 1)]), (3, [("a", 4, 4)])]
)
def test_drafts_take_no_block_that_a_known_token_needs(
    blocks: int, expected: list[tuple[str, int, int]]
) -> None:
    plan = scheduler(blocks=blocks, size=4, requests=2)
    a, b = request("a", 4, new=9), request("b", 4, new=9)
    plan.add(a)
    plan.add(b)
    run(plan)  # both are at the end of a block
    a.drafts = [2] * 6
    assert run(plan) == expected
    assert b.preemptions == (blocks == 3)


def test_tokens_after_the_end_are_dropped() -> None:
    plan = scheduler(size=2)
    one = Request("a", [7, 7], SamplingParams(max_tokens=9), end_tokens=frozenset({END}))
    plan.add(one)
    run(plan)
    one.drafts = [2, END, 3]
    step = plan.schedule()
    assert plan.update(step, [[Drawn(2), Drawn(END), Drawn(3), Drawn(1)]]) == [one]
    assert (one.answer, one.reason) == ([1, 2, END], "stop")
    assert plan.pool.match(request("b", [7, 7, 1, 2, END, 3, 1])) != []
    assert len(plan.pool.match(request("b", [7, 7, 1, 2, END, 3, 1]))) == 2
    assert plan.pool.used_count == 0


def test_cancelling_frees_blocks_at_once_also_while_a_step_runs() -> None:
    plan = scheduler()
    a, b, c = request("a", 9), request("b", 5), request("c", 40)
    for item in (a, b, c):
        plan.add(item)
    step = plan.schedule()
    plan.cancel(a)
    plan.cancel(c)
    assert plan.pool.used_count == len(b.blocks)
    assert plan.update(step, [[Drawn(1)] if chunk.samples else [] for chunk in step.chunks]) == []
    plan.check()
    assert (a.reason, a.answer, b.answer) == ("cancelled", [], [1])
    plan.cancel(a)  # once more changes nothing
    plan.cancel(b)
    assert plan.pool.used_count == 0
    assert run(plan) == []


def test_an_error_ends_one_request_and_its_blocks_are_not_shared() -> None:
    plan = scheduler()
    a, b = request("a", list(range(7))), request("b", 6)
    plan.add(a)
    plan.add(b)
    run(plan)
    assert plan.pool.match(request("c", list(range(7)))) != []
    step = plan.schedule()
    assert plan.update(step, [[Drawn(-1, error="NaN")], [Drawn(1)]]) == [a]
    plan.check()
    assert (a.reason, a.error, len(a.answer), b.state) == ("error", "NaN", 1, State.RUNNING)
    assert plan.pool.match(request("c", list(range(7)))) == []


def test_an_error_that_is_not_the_models_leaves_the_blocks_to_others() -> None:
    plan = scheduler()
    a = request("a", list(range(7)))
    plan.add(a)
    run(plan)
    assert plan.update(plan.schedule(), [[Drawn(-1, error="penalties", sound=True)]]) == [a]
    assert a.reason == "error"
    assert plan.pool.match(request("c", list(range(7)))) != []
    plan.check()


def test_times_are_taken() -> None:
    plan = scheduler()
    one = request("a", 2, new=2)
    plan.add(one)
    run(plan)
    run(plan)
    assert (one.arrived_s, one.first_token_s, one.ended_s) == (0, 1, 2)


@pytest.mark.parametrize(
    ("prompt", "new", "says"),
    [
        (0, 4, "prompt: got 0 tokens"),
        (10, 60, "max_tokens: got 60 .* allowed is 64 together; ask for at most 54"),
        (
            64,
            1,
            "prompt: got 64 tokens, allowed is 1 to 63: the context has 64 together .*; shorten",
        ),
        (41, 1, r"prompt: got 41 tokens, allowed is 1 to 40: the cache holds 40 .10 blocks of 4"),
        (20, 30, "the cache holds 40 .10 blocks of 4.; ask for at most 21"),
    ],
)
def test_what_can_never_fit_is_refused(prompt: int, new: int, says: str) -> None:
    plan = scheduler(blocks=10, size=4, longest=64)
    with pytest.raises(ConfigError, match=says):
        plan.add(request("a", prompt, new))
    plan.add(request("b", 20, 21))
    while plan.waiting or plan.running:
        run(plan)


def test_bad_limits_are_named() -> None:
    with pytest.raises(ConfigError, match="max_requests: got 0"):
        scheduler(requests=0)
    with pytest.raises(ConfigError, match="max_tokens: got 3 tokens a step, allowed is 4 or more"):
        scheduler(room=3, requests=4)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_random_load_gives_every_request_its_plain_answer(seed: int) -> None:
    chance = random.Random(seed)
    size, longest = chance.randrange(1, 6), 40
    blocks = -(-longest // size) + chance.randrange(0, 20)
    most = chance.randrange(1, 6)
    plan = Scheduler(BlockPool(blocks, size), most + chance.randrange(12), most, longest)
    engine, everyone = PlainEngine(plan), []
    speculates = chance.random() < 0.5
    for _ in range(60):
        if chance.random() < 0.5:
            everyone.append(_random_request(chance, len(everyone)))
            plan.add(everyone[-1])
        if speculates:
            for item in plan.running:
                item.drafts = guess(item, chance)
        _step(plan, engine)
        if everyone and chance.random() < 0.1:
            plan.cancel(chance.choice(everyone))
    for _ in range(2000):
        if not plan.waiting and not plan.running:
            break
        _step(plan, engine)
    assert all(item.state is State.FINISHED for item in everyone)
    assert plan.pool.used_count == 0
    for item in everyone:
        wanted = plain_answer(item.prompt, item.params)
        if item.reason == "cancelled":
            assert item.answer == wanted[: len(item.answer)]
        else:
            assert item.answer == wanted


def _random_request(chance: random.Random, number: int) -> Request:
    """Short alphabets, so that many prompts begin alike."""
    prompt = [chance.randrange(2) for _ in range(chance.randrange(1, 30))]
    params = SamplingParams(
        max_tokens=chance.randrange(1, 41 - len(prompt)), ignore_eos=chance.random() < 0.6
    )
    priority = chance.choice([0, 0, 0, -1, 3])
    return Request(str(number), prompt, params, priority, frozenset({END}))


def _step(plan: Scheduler, engine: PlainEngine) -> None:
    """One step, with what must hold of each: progress, turns, books."""
    fresh = [item for item in plan.waiting if item.preemptions == 0]
    first = min([*plan.running, *plan.waiting], key=lambda item: item.turn, default=None)
    leader = plan.running[0] if plan.running else None
    step = plan.schedule()
    plan.check()
    running = [chunk.request for chunk in step.chunks]
    assert bool(running) == (first is not None), "there is work, and nothing is done"
    if leader is not None:
        assert leader.preemptions == 0 or leader in plan.running
        assert leader in plan.running, "the first in turn was preempted"
    started = [item for item in fresh if item.state is State.RUNNING]
    assert all(a.turn < b.turn for a in started for b in plan.waiting), "overtaken"
    drawn = engine.run(step)
    plan.update(step, drawn)
    plan.check()
    for item in plan.running:
        assert item.computed < len(item.tokens)
        assert len(item.blocks) == plan.pool.blocks_for(item.computed)
