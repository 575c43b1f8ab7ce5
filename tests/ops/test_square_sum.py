"""Sums of squares in a fixed order: every kernel gives the reference's bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.square_sum import reference, square_sums
from lezero.ops.square_sum.native import NATIVE
from tests.ops.conformance import Args, OpConformance

TYPES = (torch.float32, torch.bfloat16)
SIZES = (1, 63, 64, 65, 5003, reference.BLOCK - 1, reference.BLOCK, 3 * reference.BLOCK + 777)


def numbers(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)


class TestSquareSum(OpConformance):
    native = NATIVE

    def cases(self) -> Iterator[tuple[str, Args]]:
        for dtype in TYPES:
            yield f"random {dtype}", tuple(numbers(n, dtype) for n in (4096, 1 << 16))
            yield f"ragged {dtype}", tuple(numbers(n, dtype) for n in SIZES)
        yield "ragged mixed", (numbers(70), torch.empty(0), numbers(20_000, torch.bfloat16))
        yield "empty", (torch.empty(0), torch.empty(0, dtype=torch.bfloat16))
        for name, value in (("nan", torch.nan), ("inf", -torch.inf)):
            for dtype in TYPES:
                given = numbers(777, dtype)
                given[700] = value
                yield f"{name} {dtype}", (given, numbers(5))

    def expected(self, *args: Any) -> tuple[Tensor, ...]:
        return (torch.tensor([reference.square_sum(x) for x in args], dtype=torch.float64),)

    def kernel(self, ops: Any, *args: Any) -> tuple[Tensor, ...]:
        out = torch.empty(len(args), dtype=torch.float64)
        ops.square_sums(list(args), out)
        return (out,)

    def public(self, *args: Any) -> tuple[Tensor, ...]:
        if not NATIVE.available():
            pytest.skip("no kernel here: torch adds in another order")
        return (square_sums(args),)


@pytest.mark.skipif(not NATIVE.able(), reason="no kernel here: torch adds in another order")
@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(0, 70_000), min_size=1, max_size=5), threads=st.integers(1, 3))
def test_the_sum_is_that_of_fp64_with_any_number_of_threads(sizes: list[int], threads: int) -> None:
    given = [numbers(n) for n in sizes]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = square_sums(given)
    finally:
        torch.set_num_threads(before)
    assert found.tolist() == [reference.square_sum(x) for x in given]
    for x, sum in zip(given, found.tolist(), strict=True):
        assert sum == pytest.approx(math.fsum((x.double() ** 2).tolist()), rel=1e-13)


def test_other_shapes_and_types_count_as_well() -> None:
    x = numbers(6000).view(2, 3, 1000)
    turned = x.permute(2, 0, 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        (found,) = square_sums([turned.to(dtype)]).tolist()
        exact = turned.to(dtype).double().square().sum().item()
        assert found == pytest.approx(exact, rel=1e-13), dtype
    largest = torch.full((3,), torch.finfo(torch.float32).max, requires_grad=True)
    (found,) = square_sums([largest]).tolist()
    assert found == 3 * torch.finfo(torch.float32).max ** 2  # infinite in fp32
    assert square_sums([]).shape == (0,)


def test_without_a_kernel_torch_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    given = [numbers(n).to(kind) for n, kind in zip((3, 600_000, 0, 70), kinds, strict=True)]
    exact = [x.double().square().sum().item() for x in given]
    assert square_sums(given).tolist() == pytest.approx(exact, rel=1e-12)
    monkeypatch.setattr(type(NATIVE), "available", lambda self: False)
    assert square_sums(given).tolist() == pytest.approx(exact, rel=1e-12)


def test_whole_numbers_have_no_sum() -> None:
    with pytest.raises(ConfigError, match=r"got torch\.int64, allowed are floating types"):
        square_sums([torch.ones(3, dtype=torch.int64)])
