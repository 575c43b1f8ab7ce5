"""Tokens drawn by kernels: those of the reference, which sorts everything."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.draw import draw_tokens, name_tokens, penalized, reference
from lezero.ops.draw.native import NATIVE
from tests.ops.conformance import Args, OpConformance

FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
]


def scores(R: int, V: int, spread: float = 3.0, equal: bool = False, seed: int = 0) -> Tensor:
    """Random ones; with `equal` many of them are the same."""
    generator = torch.Generator().manual_seed(seed + V)
    found = torch.randn(R, V, generator=generator) * spread
    return found.round() if equal else found


def asked(R: int, V: int, temperature: float = 1.0, seed: int = 0, **filters: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(R, generator=generator, dtype=torch.float64)
    numbers = [temperature, min(filters.get("top_k", V), V), filters.get("top_p", 2.0)]
    numbers.append(filters.get("min_p", 0.0))
    return torch.cat([torch.tensor([numbers], dtype=torch.float64).expand(R, 4), drawn[:, None]], 1)


def poisoned(value: float, where: int) -> Tensor:
    found = scores(4, 300)
    found[1, where] = value
    found[3] = value
    return found


class TestDraw(OpConformance):
    native = NATIVE

    def cases(self) -> Iterator[tuple[str, Args]]:
        for V, equal in product((1, 2, 127, 128, 129, 1000, 50_000), (False, True)):
            kind = "ragged" if V % 128 else "random"
            for T, filters in product((0.0, 1e-3, 0.7, 1.0, 100.0), FILTERS):
                R = 24 if V <= 1000 else 2
                given = (scores(R, V, equal=equal), asked(R, V, T, **filters))
                yield f"{kind} {V}, {T}, {filters}, equal {equal}", given
        yield "random flat", (scores(6, 20_000, 0.0), asked(6, 20_000))
        yield "random steep", (scores(6, 20_000, 1e4), asked(6, 20_000, top_k=30))
        yield "random hardly warm", (scores(6, 900), asked(6, 900, 5e-324))
        yield "empty", (torch.empty(0, 7), asked(0, 7))
        for where in (0, 5, 127, 130, 299):
            yield f"nan {where}", (poisoned(torch.nan, where), asked(4, 300))
            yield f"inf {where}", (poisoned(torch.inf, where), asked(4, 300, top_p=0.9))
            yield f"inf below {where}", (poisoned(-torch.inf, where), asked(4, 300, top_k=300))

    def expected(self, *args: Any) -> tuple[Tensor, ...]:
        return reference.draw_tokens(*args)

    def kernel(self, ops: Any, *args: Any) -> tuple[Tensor, ...]:
        R = args[0].shape[0]
        token_R, highest_R = torch.full((R,), -1), torch.empty(R)
        ops.draw_tokens(*args, token_R, highest_R)
        return token_R, highest_R

    def public(self, *args: Any) -> tuple[Tensor, ...]:
        return draw_tokens(*args)


class TestName(OpConformance):
    native = NATIVE
    rtol, atol = 3e-7, 1e-7

    def cases(self) -> Iterator[tuple[str, Args]]:
        for V, most, equal in product((1, 5, 128, 1001, 30_000), (0, 1, 20), (False, True)):
            kind = "ragged" if V % 128 else "random"
            token_R = torch.arange(3) % V
            given = (scores(3, V, equal=equal), token_R, min(most, V))
            yield f"{kind} {V}, {most}, equal {equal}", given
        yield "random all", (scores(2, 5000, 0.0), torch.tensor([4, 4999]), 5000)
        yield "empty", (torch.empty(0, 7), torch.empty(0, dtype=torch.int64), 3)
        for name, value in (("nan", torch.nan), ("inf", torch.inf), ("inf below", -torch.inf)):
            yield name, (poisoned(value, 130), torch.tensor([0, 130, 7, 1]), 4)

    def expected(self, *args: Any) -> tuple[Tensor, ...]:
        return reference.name_tokens(*args)

    def kernel(self, ops: Any, *args: Any) -> tuple[Tensor, ...]:
        logits_RV, token_R, most = args
        R = logits_RV.shape[0]
        found = torch.empty(R), torch.full((R, most), -1), torch.empty(R, most)
        ops.name_tokens(logits_RV, token_R, *found)
        return found

    def public(self, *args: Any) -> tuple[Tensor, ...]:
        return name_tokens(*args)


def texts(R: int, V: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(R + V)
    lengths = torch.randint(0, longest + 1, (R,), generator=generator).tolist()
    return [torch.randint(0, V, (n,), generator=generator).tolist() for n in lengths]


class TestPenalized(OpConformance):
    native = NATIVE
    rtol, atol = 1e-6, 1e-6

    def cases(self) -> Iterator[tuple[str, Args]]:
        for V, longest in product((1, 40, 1000), (0, 3, 200)):
            R = 6
            numbers = [
                (1.3, 0, 0),
                (1, 0.5, 0),
                (1, 0, 0.7),
                (0.01, -2, 2),
                (100, 2, -2),
                (1, 0, 0),
            ]
            penalties_R3 = torch.tensor(numbers, dtype=torch.float64)
            kind = "ragged" if longest % 2 else "random"
            prompts = tuple(min(longest, n) for n in (0, 1, 2, 500, 7, 3))
            yield (
                f"{kind} {V}, {longest}",
                (*(scores(R, V), texts(R, V, longest), prompts, penalties_R3),),
            )
        none = torch.empty(0, 3, dtype=torch.float64)
        yield "empty", (torch.empty(0, 7), [], (), none)
        one = torch.tensor([[2.0, 1, 1]] * 4, dtype=torch.float64)
        for name, value in (("nan", torch.nan), ("inf", torch.inf), ("inf below", -torch.inf)):
            yield name, (poisoned(value, 5), [[5, 6, 5]] * 4, (1, 0, 3, 9), one)

    def expected(self, *args: Any) -> tuple[Tensor, ...]:
        return (reference.penalized(*args),)

    def kernel(self, ops: Any, *args: Any) -> tuple[Tensor, ...]:
        scores_RV, several, prompts, penalties_R3 = args
        spans, flat = [], list[int]()
        for text, prompt in zip(several, prompts, strict=True):
            spans.append((len(flat), len(flat) + min(prompt, len(text)), len(flat) + len(text)))
            flat += text
        out_RV = torch.empty_like(scores_RV)
        given = (torch.tensor(flat, dtype=torch.int64), torch.tensor(spans, dtype=torch.int64))
        ops.penalize(scores_RV, *given, penalties_R3, out_RV)
        return (out_RV,)

    def public(self, *args: Any) -> tuple[Tensor, ...]:
        return (penalized(*args),)


@settings(deadline=None, max_examples=60)
@given(
    V=st.integers(1, 700),
    spread=st.sampled_from([0.0, 0.1, 2.0, 30.0]),
    temperature=st.floats(0.0, 10.0),
    top_k=st.integers(1, 800),
    top_p=st.floats(0.0, 3.0),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(0, 9),
)
def test_any_parameters(V, spread, temperature, top_k, top_p, min_p, seed) -> None:  # type: ignore[no-untyped-def]
    scores_RV = scores(5, V, spread, seed=seed)
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    asked_R5 = asked(5, V, temperature, seed, **filters)
    for one, other in zip(
        draw_tokens(scores_RV, asked_R5), reference.draw_tokens(scores_RV, asked_R5), strict=True
    ):
        assert torch.equal(one, other)


def test_shares_are_those_of_the_distribution() -> None:
    scores_V = torch.tensor([0.5, 2.0, -1.0, 1.0, -9.0])
    count = 40_000
    drawn = asked(count, 5, 0.8)
    token_R, _ = draw_tokens(scores_V.expand(count, 5), drawn)
    found = token_R.bincount(minlength=5) / count
    torch.testing.assert_close(found, (scores_V / 0.8).softmax(0), rtol=0, atol=0.01)


@pytest.mark.parametrize("drawn", [0.0, 1 - 2**-53])
def test_the_ends_of_chance_give_tokens_that_are_kept(drawn: float) -> None:
    scores_RV = torch.cat([scores(1, 3000), torch.full((1, 3000), -torch.inf)], 1)
    for filters in FILTERS:
        asked_R5 = asked(1, 6000, **filters)
        asked_R5[:, 4] = drawn
        (token,), _ = draw_tokens(scores_RV, asked_R5)
        assert token < 3000


def test_a_row_does_not_depend_on_others() -> None:
    scores_RV, asked_R5 = scores(40, 4000), asked(40, 4000, top_p=0.9)
    together = draw_tokens(scores_RV, asked_R5)[0]
    alone = [draw_tokens(scores_RV[r : r + 1], asked_R5[r : r + 1])[0] for r in range(40)]
    assert torch.equal(together, torch.cat(alone))


def test_what_is_drawn_at_a_boundary_is_the_next_token() -> None:
    for V in (2, 4, 8, 64, 256):
        numbers = [[1.0, V, 2, 0, n / V] for n in range(V)]
        asked_R5 = torch.tensor(numbers, dtype=torch.float64)
        assert draw_tokens(torch.zeros(V, V), asked_R5)[0].tolist() == list(range(V))


@pytest.mark.parametrize("top_p", [2.0, 1.0, 0.999999])
def test_the_end_of_chance_is_the_end_of_what_is_kept(top_p: float) -> None:
    for V in range(2, 300):
        generator = torch.Generator().manual_seed(V)
        few = torch.randint(0, 3, (1, V), generator=generator)
        close = torch.tensor([1.0, 1 - 2**-23, -torch.inf])[few]
        for T, scores_RV in ((1.0, close), (5.0, torch.randn(1, V, generator=generator) * 4)):
            scores_RV[0, 0], scores_RV[0, 1] = -torch.inf, 1.0
            asked_R5 = torch.tensor([[T, V, top_p, 0, 1 - 2**-53]], dtype=torch.float64)
            (token,), _ = draw_tokens(scores_RV, asked_R5)
            share = (scores_RV[0].double() / T).softmax(0)
            assert share[token] > 0
            assert share[scores_RV[0] < scores_RV[0, token]].sum() < max(0, 1 - top_p) + 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    scores_RV, asked_R5 = scores(64, 300), asked(64, 300, top_p=0.9)
    given = (scores_RV, torch.arange(64), 20)
    wanted = [*draw_tokens(scores_RV, asked_R5), *name_tokens(*given)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = [*draw_tokens(scores_RV, asked_R5), *name_tokens(*given)]
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("size", [1e9, 1e17, 1e30])
def test_log_probabilities_of_huge_logits(size: float) -> None:
    own_R, _, found_RM = name_tokens(torch.full((1, 8), size), torch.tensor([3]), 1)
    assert own_R.item() == found_RM.item() == pytest.approx(-2.0794415, rel=1e-6)


def test_texts_of_any_sequence_and_prompts_of_any_length() -> None:
    penalties_R3 = torch.tensor([[2.0, 0.5, 0.1]], dtype=torch.float64)
    wanted = penalized(torch.ones(1, 9), [[2, 3]], [0], penalties_R3)
    for text, prompt in (((2, 3), -5), (array("q", [2, 3]), 0)):
        found = penalized(torch.ones(1, 9), [text], [prompt], penalties_R3)
        assert torch.equal(found, wanted)


def test_what_is_wrong_is_told() -> None:
    with pytest.raises(ConfigError, match=r"scores of torch.bfloat16 \(2, 3\); allowed are"):
        draw_tokens(torch.zeros(2, 3).bfloat16(), asked(2, 3))
    with pytest.raises(ConfigError, match=r"\(2, 0\); allowed are float32, \(R, V\)"):
        draw_tokens(torch.zeros(2, 0), asked(2, 3))
    with pytest.raises(ConfigError, match=r"asked is torch.float64 \(1, 5\); allowed is"):
        draw_tokens(torch.zeros(2, 3), asked(1, 3))
    with pytest.raises(ConfigError, match=r"tokens are torch.int64 \(1,\); allowed is torch.int64"):
        name_tokens(torch.zeros(2, 3), torch.zeros(1, dtype=torch.int64), 1)
    with pytest.raises(ConfigError, match="most: got 4, allowed is 0 to 3"):
        name_tokens(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), 4)
    with pytest.raises(
        ConfigError, match=r"penalties are torch.float32 \(1, 3\); allowed is torch.float64"
    ):
        penalized(torch.zeros(1, 3), [[1]], [0], torch.zeros(1, 3))
    if NATIVE.available():
        with pytest.raises(RuntimeError, match="a text holds a token that is none of 3"):
            penalized(torch.zeros(1, 3), [[3]], [0], torch.zeros(1, 3, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="token 3 is none of 3"):
            name_tokens(torch.zeros(1, 3), torch.tensor([3]), 1)


@pytest.mark.parametrize(("texts", "prompts"), [(2, 2), (4, 4), (3, 2)])
def test_a_text_and_a_prompt_for_each_row(texts: int, prompts: int) -> None:
    penalties_R3 = torch.tensor([[1.2, 0, 0]] * 3, dtype=torch.float64)
    with pytest.raises(ConfigError, match="for 3 rows"):
        penalized(torch.zeros(3, 9), [[1]] * texts, [0] * prompts, penalties_R3)
