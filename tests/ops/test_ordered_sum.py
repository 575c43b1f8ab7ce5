"""Sums in a fixed order: every kernel gives the reference's bits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.ordered_sum import ordered_sum, reference
from lezero.ops.ordered_sum.native import NATIVE
from tests.ops.conformance import Args, OpConformance

TYPES = (torch.float32, torch.bfloat16)


def parts_of(n: int, *dtypes: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(n + len(dtypes))
    return tuple(torch.randn(n, generator=generator).to(dtype) for dtype in dtypes)


class TestOrderedSum(OpConformance):
    native = NATIVE

    def cases(self) -> Iterator[tuple[str, Args]]:
        for number, (one, other, out) in enumerate(product(TYPES, repeat=3)):
            kind = "random" if number % 2 else "ragged"
            n = 4096 if number % 2 else 5003
            yield f"{kind} {number}", (*parts_of(n, one, other, one), torch.empty(n, dtype=out))
        yield "ragged alone", (*parts_of(2049, torch.bfloat16), torch.empty(2049))
        yield "empty", (*parts_of(0, *TYPES), torch.empty(0))
        for name, value in (("nan", torch.nan), ("inf", torch.inf)):
            for out in TYPES:
                first, second = parts_of(77, *TYPES)
                first[5], second[70] = value, -value
                yield f"{name} {out}", (first, second, torch.empty(77, dtype=out))
        largest = torch.full((40,), torch.finfo(torch.float32).max)
        yield "inf by rounding", (largest, torch.empty(40, dtype=torch.bfloat16))

    def expected(self, *args: Any) -> tuple[Tensor, ...]:
        reference.ordered_sum(args[:-1], args[-1])
        return (args[-1],)

    def kernel(self, ops: Any, *args: Any) -> tuple[Tensor, ...]:
        ops.ordered_sum(list(args[:-1]), args[-1])
        return (args[-1],)

    def public(self, *args: Any) -> tuple[Tensor, ...]:
        ordered_sum(args[:-1], args[-1])
        return (args[-1],)


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(0, 9000),
    types=st.lists(st.sampled_from(TYPES), min_size=1, max_size=5),
    place=st.integers(0, 4),
)
def test_the_sum_may_be_written_over_a_part(n: int, types: list[torch.dtype], place: int) -> None:
    parts = parts_of(n, *types)
    place = min(place, len(parts) - 1)
    wanted = torch.empty(n, dtype=parts[place].dtype)
    reference.ordered_sum(parts, wanted)
    ordered_sum(parts, parts[place])
    assert torch.equal(parts[place], wanted)


def test_the_order_is_that_of_the_arguments() -> None:
    large, small = torch.tensor([1e8]), torch.tensor([1.0])
    out = torch.empty(1)
    ordered_sum([large, small, -large], out)
    assert out.item() == 0
    ordered_sum([large, -large, small], out)
    assert out.item() == 1


def test_what_cannot_be_added_is_told() -> None:
    with pytest.raises(ConfigError, match="`parts` is empty"):
        ordered_sum([], torch.empty(1))
    with pytest.raises(ConfigError, match="int64, allowed is float32"):
        ordered_sum([torch.ones(3, dtype=torch.int64)], torch.empty(3))
    with pytest.raises(ConfigError, match=r"shapes differ: \(4,\) and \(3,\)"):
        ordered_sum([torch.ones(4)], torch.empty(3))
