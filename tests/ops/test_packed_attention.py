"""Attention within packed texts: every kernel and torch's padded groups equal the formula."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from lezero.core.errors import ConfigError
from lezero.ops.packed_attention import packed_attention, reference
from lezero.ops.packed_attention.native import NATIVE
from tests.ops.conformance import Args, OpConformance

TYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = [3, 1, 60, 9, 16, 30, 65]


def seeded(lengths: Sequence[int], width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(sum(lengths) + width)
    return [torch.randn(sum(lengths), width, generator=drawn).to(dtype) for _ in range(3)]


def spoiled(value: float, place: int) -> list[Tensor]:
    found = seeded([4, 20, 7], 32)
    found[place][9, 3] = value
    return found


class TestPackedAttention(OpConformance):
    """q, k, v, lengths, heads. bf16 and fp16 are rounded once, from sums in fp32."""

    native = NATIVE
    rtol, atol = 1e-2, 1e-5

    def cases(self) -> Iterator[tuple[str, Args]]:
        for dtype in TYPES:
            yield f"random {dtype}", (*seeded([64, 64], 64, dtype), [64, 64], 2)
            yield f"ragged {dtype}", (*seeded(LENGTHS, 96, dtype), LENGTHS, 2)
        draw = random.Random(0)
        for _ in range(12):
            lengths = [draw.randint(1, 90) for _ in range(draw.randint(1, 9))]
            heads, width = draw.randint(1, 5), 16 * draw.randint(1, 9)
            yield (
                f"ragged {lengths} {heads} {width}",
                (*seeded(lengths, heads * width), lengths, heads),
            )
        yield "ragged, of a width without a kernel", (*seeded(LENGTHS, 40), LENGTHS, 2)
        yield "random, one long text", (*seeded([700], 32), [700], 1)
        low = [torch.full((21, 32), 1e15), -1e15 * seeded([21], 32)[1].abs(), seeded([21], 32)[2]]
        yield "random, scores of -1e30", (*low, [5, 16], 1)
        few = [torch.zeros(5, 32), torch.zeros(5, 32), torch.ones(5, 32)]
        few[0][:, 0], few[1][:, 0] = 1000, -10
        few[1][0, 0], few[2][3] = 10, 3e38
        yield "random, nothing of a value near the largest", (*few, [5], 1)
        large = [30 * x for x in seeded([50, 3], 64)]
        yield "random, weights of nearly 0 and 1", (*large, [50, 3], 2)
        yield "empty", (*seeded([], 32), [], 2)
        for name, value in (("nan", torch.nan), ("inf", torch.inf)):
            for place in range(3):
                yield f"{name} {place}", (*spoiled(value, place), [4, 20, 7], 2)
                first = seeded([14, 17], 24)
                first[place][0, 1] = value
                yield f"{name} {place}, without a kernel", (*first, [14, 17], 1)

    def expected(self, *args: Any) -> tuple[Tensor, ...]:
        return (reference.packed_attention(*args),)

    def kernel(self, ops: Any, *args: Any) -> tuple[Tensor, ...]:
        q, k, v, lengths, heads = args
        if q.shape[1] // heads % 16:
            return self.expected(*args)
        begins = torch.tensor([0, *lengths]).cumsum(0)
        out = torch.empty_like(q)
        ops.attend(q, k, v, begins, out, heads)
        return (out,)

    def public(self, *args: Any) -> tuple[Tensor, ...]:
        return (packed_attention(*args),)


def test_it_is_as_exact_as_torch() -> None:
    parts = seeded(LENGTHS, 96)
    exact = reference.packed_attention(*(x.double() for x in parts), LENGTHS, 3)
    assert (packed_attention(*parts, LENGTHS, 3) - exact).abs().max() < 3e-6


@pytest.mark.parametrize("dtype", TYPES)
def test_a_text_gets_the_same_alone(dtype: torch.dtype) -> None:
    parts = seeded(LENGTHS, 96, dtype)
    together = packed_attention(*parts, LENGTHS, 3).split(LENGTHS)
    for *alone, found in zip(*(x.split(LENGTHS) for x in parts), together, strict=True):
        assert torch.equal(packed_attention(*alone, [len(found)], 3), found)


def test_lengths_may_be_a_tensor_or_a_generator() -> None:
    parts = seeded(LENGTHS, 96)
    wanted = packed_attention(*parts, LENGTHS, 3)
    assert torch.equal(packed_attention(*parts, torch.tensor(LENGTHS), 3), wanted)  # type: ignore[arg-type]
    assert torch.equal(packed_attention(*parts, (n for n in LENGTHS), 3), wanted)  # type: ignore[arg-type]


def test_parts_of_a_wider_tensor_are_read_where_they_lie() -> None:
    wide = torch.cat(seeded(LENGTHS, 96), 1)
    found = packed_attention(*wide.split(96, 1), LENGTHS, 3)
    assert torch.equal(found, packed_attention(*seeded(LENGTHS, 96), LENGTHS, 3))


def test_gradients_are_those_of_the_formula() -> None:
    ours, theirs = ([x.double().requires_grad_() for x in seeded(LENGTHS, 32)] for _ in range(2))
    packed_attention(*ours, LENGTHS, 2).sin().sum().backward()
    reference.packed_attention(*theirs, LENGTHS, 2).sin().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_other_derivatives_are_those_of_the_formula() -> None:
    parts = tuple(x.double() for x in seeded([5, 9], 32))
    turns = tuple(x.flip(0) for x in parts)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(q, k, v, [5, 9], 2)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.packed_attention(q, k, v, [5, 9], 2)

    wanted = torch.func.jvp(theirs, parts, turns)
    torch.testing.assert_close(torch.func.jvp(ours, parts, turns), wanted)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(parts, turns, strict=True)]
        tangent = forward_ad.unpack_dual(ours(*duals)).tangent
    torch.testing.assert_close(tangent, wanted[1])
    many = torch.stack([parts[0], turns[0]])
    found = torch.vmap(ours, (0, None, None))(many, *parts[1:])
    torch.testing.assert_close(found[1], theirs(turns[0], *parts[1:]))


def test_padded_groups_hold_texts_of_similar_length() -> None:
    assert reference.similar([3, 100, 4, 90, 30, 16]) == [[0, 2, 5], [4], [3, 1]]


def test_torch_knows_the_op() -> None:
    args = (*seeded([5, 9], 32), [5, 9], 2)
    torch.library.opcheck(torch.ops.lezero.packed_attention.default, args)
    compiled = torch.compile(
        lambda q, k, v: packed_attention(q, k, v, [5, 9], 2) + 1,
        backend="aot_eager",
        fullgraph=True,
    )
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args[:3]), packed_attention(*args) + 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"heads": 3}, "32.*with 3 heads"),
        ({"heads": 0}, "with 0 heads"),
        ({"lengths": [5, 8]}, "add up to 13 of 14 tokens"),
        ({"lengths": [14, 0]}, "the shortest has 0"),
        ({"lengths": [15, -1]}, "the shortest has -1"),
        ({"k_ND": torch.ones(13, 32)}, r"\(13, 32\)"),
        ({"k_ND": torch.ones(14, 32).bfloat16()}, "bfloat16"),
        ({"k_ND": torch.ones(14, 32, device="meta")}, "on meta"),
        ({n: torch.ones(14, 32).to(torch.float8_e5m2) for n in ("q_ND", "k_ND", "v_ND")}, "float8"),
        ({"lengths": [7.0, 7.0]}, "allowed are whole numbers"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], said: str) -> None:
    q, k, v = seeded([5, 9], 32)
    given: dict[str, Any] = {"q_ND": q, "k_ND": k, "v_ND": v, "lengths": [5, 9], "heads": 2}
    with pytest.raises(ConfigError, match=said):
        packed_attention(**given | change)
