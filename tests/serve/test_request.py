import pytest

from lezero.serve import Drawn, Request, SamplingParams
from lezero.serve.sampling import TokenLogprob


@pytest.mark.parametrize(
    ("params", "tokens", "reasons"),
    [
        (SamplingParams(max_tokens=2), [5, 6], [None, "length"]),
        (SamplingParams(max_tokens=5), [5, 2], [None, "stop"]),
        (SamplingParams(max_tokens=5, ignore_eos=True), [2, 2], [None, None]),
        (
            SamplingParams(max_tokens=5, ignore_eos=True, stop_token_ids=(7,)),
            [2, 7],
            [None, "stop"],
        ),
        (SamplingParams(max_tokens=1), [2], ["stop"]),
    ],
)
def test_a_token_may_end_the_answer(
    params: SamplingParams, tokens: list[int], reasons: list[str | None]
) -> None:
    request = Request("a", [1, 2, 3], params, end_tokens=frozenset({2}))
    assert [request.take(Drawn(token)) for token in tokens] == reasons
    assert request.answer == tokens
    assert request.prompt == [1, 2, 3]


def test_log_probabilities_are_kept_beside_the_tokens() -> None:
    request = Request("a", [1], SamplingParams(logprobs=1))
    request.take(Drawn(4, TokenLogprob(-0.5, ((4, -0.5),))))
    assert request.logprobs == [TokenLogprob(-0.5, ((4, -0.5),))]


def test_without_a_seed_chance_is_none_that_can_be_asked_for() -> None:
    found = []
    for number in (0, 1, 9):
        request = Request("a", [1])
        request.number = number
        found.append(request.seed)
    assert len(set(found)) == 3
    assert min(found) >= 1 << 63  # seeds that are given are smaller
    assert Request("a", [1], SamplingParams(seed=3)).seed == 3


def test_what_is_left_to_do_is_counted() -> None:
    request = Request("a", [1, 2, 3], SamplingParams(max_tokens=4))
    assert (request.pending, request.wanted) == (3, 4)
    request.computed = 3
    request.take(Drawn(8))
    assert (request.pending, request.wanted) == (1, 3)
