import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lezero.core.errors import ConfigError, NumericsError
from lezero.models import Sampling
from lezero.models.sampling import chance, choose, probabilities


def by_hand(
    logits: list[float],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
) -> list[float]:
    """The definition, one token at a time."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k is not None:
        order = order[:top_k]
    weight = {t: math.exp((logits[t] - max(logits)) / temperature) for t in order}
    total = math.fsum(weight.values())
    kept, before = {}, 0.0
    for token in order:
        if (top_p is None or before < top_p) and weight[token] >= (min_p or 0.0):
            kept[token] = weight[token] / total
        before += weight[token] / total
    total = math.fsum(kept.values())
    return [kept.get(token, 0.0) / total for token in range(len(logits))]


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.none() | st.integers(1, 15),
    top_p=st.none() | st.sampled_from([1e-9, 0.17, 0.513, 0.871, 1.0]),
    min_p=st.none() | st.sampled_from([0.0, 0.013, 0.31, 1.0]),
)
def test_the_filters_are_those_of_the_definition(
    logits: list[float],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = probabilities(torch.tensor([logits]), sampling)[0]
    wanted = torch.tensor(by_hand(logits, temperature, top_k, top_p, min_p), dtype=torch.float64)
    assert torch.equal(found > 0, wanted > 0)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_ties_keep_exactly_k_tokens() -> None:
    found = probabilities(torch.zeros(1, 6), Sampling(temperature=1.0, top_k=2))
    assert found[0].tolist() == [0.5, 0.5, 0, 0, 0, 0]


def test_tokens_that_reach_top_p_exactly_are_enough() -> None:
    found = probabilities(torch.zeros(1, 4), Sampling(temperature=1.0, top_p=0.5))
    assert found[0].tolist() == [0.5, 0.5, 0, 0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.7, top_k=3, seed=2),
        Sampling(temperature=1.3, top_p=0.8, seed=3),
    ],
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    logits = torch.tensor([[1.0, 0.2, -0.5, 0.7, -2.0]])
    tries = 4000
    drawn = choose(logits.expand(tries, 5), sampling, [7] * tries, range(tries))
    counts = torch.bincount(drawn, minlength=5).double()
    wanted = probabilities(logits, sampling)[0] * tries
    assert bool((counts[wanted == 0] == 0).all())
    kept = wanted > 0
    chi_square = ((counts - wanted)[kept].square() / wanted[kept]).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: 1 in 1,000; the seeds are fixed


def test_chance_is_uniform_and_depends_on_seed_position_and_sample() -> None:
    drawn = torch.tensor([chance(0, position, 0) for position in range(4000)])
    counts = torch.histc(drawn, 10, 0, 1)
    assert ((counts - 400).square() / 400).sum() < 27.9  # 9 degrees of freedom: 1 in 1,000
    assert len({chance(0, 1, 2), chance(1, 1, 2), chance(0, 2, 1), chance(0, 12, 0)}) == 4
    assert chance(5, 6, 7) == chance(5, 6, 7)


def test_temperature_zero_is_the_most_likely_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    assert choose(logits, Sampling(), [0, 0], [0, 1]).tolist() == [1, 0]
    assert probabilities(logits, Sampling()).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_extreme_logits_still_give_a_token() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [-torch.inf, 0.0, -torch.inf]])
    drawn = choose(logits, Sampling(temperature=1e-3, top_p=0.5), [0, 0], [0, 1])
    assert drawn.tolist() == [0, 1]
    with pytest.raises(NumericsError, match="NaN"):
        choose(torch.tensor([[torch.nan, 0.0]]), Sampling(), [0], [0])
    for logits in ([torch.inf, 0.0], [-torch.inf, -torch.inf]):
        for temperature in (0.0, 1.0):
            with pytest.raises(NumericsError, match="no finite maximum"):
                choose(torch.tensor([logits]), Sampling(temperature=temperature), [0], [0])
    assert choose(torch.tensor([[-torch.inf, 0.0]]), Sampling(temperature=1.0), [0], [0]) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"top_k": 0}, "top_k: got 0"),
        ({"top_p": 0.0}, "top_p: got 0.0"),
        ({"top_p": 1.5}, "top_p: got 1.5"),
        ({"min_p": 1.5}, "min_p: got 1.5"),
        ({"seed": -1}, "seed: got -1"),
        ({"topp": 0.5}, "did you mean 'top_p'"),
    ],
)
def test_a_bad_setting_is_named(change: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Sampling(**change)
