"""Steps launched ahead give what steps that are waited for give, and leave no block behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from lezero.serve.embed import embed
from lezero.serve.engine import Engine
from lezero.serve.flight import Flight
from lezero.serve.request import Request
from lezero.serve.sampling import SamplingParams
from tests.serve.flying import Flying, Walking, poisoned
from tests.serve.models import prompts

LENGTHS = (1, 2, 30, 17, 9, 40)
Act = Callable[[Engine, list[Request], int], None]


def asked(**changes: Any) -> list[Request]:
    """Greedy ones of many lengths, some of which meet an end token sooner."""
    return [
        Request(
            str(number),
            prompt,
            SamplingParams(temperature=0, max_tokens=LENGTHS[number % 6], **changes),
            end_tokens=frozenset(range(0, 97, 12)),
        )
        for number, prompt in enumerate(prompts(14, seed=2))
    ]


def answered(
    program: Flying,
    requests: list[Request],
    *,
    blocks: int = 200,
    at_once: int = 20,
    act: Act | None = None,
) -> list[Any]:
    engine = Engine(program, blocks=blocks, max_requests=at_once, longest=256)
    for request in requests:
        engine.add(request)
    steps = 0
    while engine.busy:
        for request, tokens in engine.step().tokens.items():
            assert request.tokens[-len(tokens) :] == tokens
        if act is not None:
            act(engine, requests, steps)
        engine.scheduler.check()
        steps += 1
        assert steps < 2000
    assert engine.pool.used_count == 0
    assert engine.totals.drawn == sum(len(request.answer) for request in requests)
    return [(request.answer, request.reason) for request in requests]


@pytest.mark.parametrize(("blocks", "at_once"), [(200, 20), (200, 3), (9, 20), (6, 5)])
def test_answers_are_the_same(blocks: int, at_once: int) -> None:
    flying, walking = Flying(), Walking()
    found = answered(flying, asked(), blocks=blocks, at_once=at_once)
    assert found == answered(walking, asked(), blocks=blocks, at_once=at_once)
    assert {reason for _, reason in found} == {"stop", "length"}
    assert not walking.launched
    ahead = [count for count, behind in flying.launched if behind]
    assert len(ahead) > 20
    assert len(set(ahead)) > 1  # rows leave as their requests end
    assert flying.most_unread == 2


def test_a_request_alone_never_waits() -> None:
    program = Flying()
    params = SamplingParams(temperature=0, max_tokens=40)
    answered(program, [Request("a", [1, 2, 3], params)])
    assert program.launched == [(1, False)] + [(1, True)] * 38  # the first token is the prompt's


@pytest.mark.parametrize("when", range(1, 8))
def test_who_leaves_or_comes_while_a_step_flies(when: int) -> None:
    def act(engine: Engine, requests: list[Request], steps: int) -> None:
        if steps == when:
            engine.cancel(requests[2])
            engine.cancel(requests[5])
            engine.add(Request("late", [5] * 20, SamplingParams(temperature=0, max_tokens=5)))

    walked = dict(enumerate(answered(Walking(), asked())))
    for number, found in enumerate(answered_apart(Flying(), act)):
        if number in (2, 5) and found[1] == "cancelled":
            assert found[0] == walked[number][0][: len(found[0])]
        else:
            assert found == walked[number]


def answered_apart(program: Flying, act: Act) -> list[Any]:
    """`answered`, where others come too, whose tokens are not counted."""
    requests = asked()
    engine = Engine(program, blocks=60, max_requests=20, longest=256)
    for request in requests:
        engine.add(request)
    steps = 0
    while engine.busy:
        engine.step()
        act(engine, requests, steps)
        engine.scheduler.check()
        steps += 1
    assert engine.pool.used_count == 0
    return [(request.answer, request.reason) for request in requests]


def test_who_comes_while_steps_fly_has_its_turn() -> None:
    engine = Engine(Flying(), blocks=60, max_requests=20, longest=256)
    long, late = (
        Request(str(new), [1, 2, 3], SamplingParams(temperature=0, max_tokens=new))
        for new in (100, 2)
    )
    engine.add(long)
    for _ in range(5):
        engine.step()
    engine.add(late)
    for _ in range(5):
        engine.step()
    assert (late.reason, long.reason) == ("length", None)


def test_all_leave_while_a_step_flies() -> None:
    program = Flying()
    engine = Engine(program, blocks=60, max_requests=20, longest=256)
    first = Request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=40))
    engine.add(first)
    for _ in range(5):
        engine.step()
    engine.cancel(first)
    assert not engine.busy
    read = program.read
    assert not engine.step().tokens
    again = Request("b", [1, 2, 3], SamplingParams(temperature=0, max_tokens=40))
    engine.add(again)
    while engine.busy:
        engine.step()
    assert program.read == read + 39  # the one that nobody wanted was not waited for
    assert again.answer[:5] == first.answer


def test_embeddings_between_steps_preempt_requests_that_fly() -> None:
    def act(engine: Engine, requests: list[Request], steps: int) -> None:
        if steps in (3, 4, 11):
            embed(engine, [[7] * 90])

    found = answered(Flying(), asked(), blocks=12, act=act)
    assert found == answered(Walking(), asked(), blocks=12)


def test_a_trial_of_the_model_between_steps_changes_nothing(caplog: Any) -> None:
    def act(engine: Engine, requests: list[Request], steps: int) -> None:
        if steps % 4 == 2:
            assert engine.works()

    for blocks in (6, 200):  # few: some requests give theirs back for it
        found = answered(Flying(), asked(), blocks=blocks, act=act)
        assert found == answered(Walking(), asked(), blocks=blocks)
    assert not caplog.text  # no flight was lost to it


def test_what_is_not_greedy_is_waited_for() -> None:
    for params in ({"logprobs": 0}, {"repetition_penalty": 1.1}):
        program = Flying()
        assert answered(program, asked(**params)) == answered(Walking(), asked(**params))
        assert not program.launched
    program, sampled = Flying(), Request("s", [4], SamplingParams(max_tokens=4, seed=1))
    longer = [Request(x, [int(x)], SamplingParams(temperature=0, max_tokens=9)) for x in "78"]
    answered(program, [*longer, sampled])
    assert {count for count, _ in program.launched} == {2}  # once the other has ended


@pytest.mark.parametrize("poison", [False, True])
def test_logits_that_are_no_numbers_end_one_request(poison: bool) -> None:
    found = []
    for program in (Flying(), Walking()):
        if poison:
            longest = max((found for found, _ in answered(Walking(), asked())), key=len)
            poisoned(program, token=longest[len(longest) // 2])
        found.append(answered(program, asked()))
    assert found[0] == found[1]
    assert any(reason == "error" for _, reason in found[0]) == poison


@pytest.mark.parametrize("flight", [0, 1, 5])
def test_a_flight_that_fails_is_run_again(flight: int, caplog: Any) -> None:
    program = Flying()
    program.fails_at = flight
    assert answered(program, asked()) == answered(Walking(), asked())
    assert "a launched step failed" in caplog.text
    assert len(program.launched) > flight + 2


def test_what_cannot_be_launched_is_run(caplog: Any) -> None:
    class Stuck(Flying):
        def launch(self, *given: Any) -> Any:
            if len(self.launched) == 4:
                raise MemoryError
            return super().launch(*given)

    class Never(Flying):
        def launch(self, *given: Any) -> Any:
            return None

    expected = answered(Walking(), asked())
    assert answered(Stuck(), asked()) == expected
    assert caplog.text.count("a step was not launched") == 1
    assert answered(Never(), asked()) == expected


def test_the_host_makes_no_tensor_for_a_step_that_flies() -> None:
    class Known(Flight):
        def tokens(self) -> list[int]:
            return [7]

    class Empty(Flying):
        def launch(self, *given: Any) -> Flight:
            return Known()

    made: list[str] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made.append(str(op))
            return op(*args, **(kwargs or {}))

    engine = Engine(Empty(), blocks=20, max_requests=4, longest=200)
    engine.add(Request("a", [1, 2], SamplingParams(temperature=0, max_tokens=100)))
    engine.step()
    with Counted():
        while engine.busy:
            engine.step()
    assert engine.totals.drawn == 100
    assert not made
