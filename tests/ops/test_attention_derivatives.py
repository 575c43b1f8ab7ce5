"""Derivatives of attention beside the plain backward pass, against torch's formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lezero.ops.attention import FastAttention, attention

BF16 = torch.bfloat16
CASES = {"causal": (2, 2, 7, 7, True), "whole": (2, 2, 5, 9, False), "shared": (4, 2, 6, 6, True)}


def tensors(H: int, G: int, M: int, N: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(1, H, M, 32), (1, G, N, 32), (1, G, N, 32)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def torchs(causal: bool) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def ours(causal: bool) -> Callable[..., Tensor]:
    return lambda *x: attention(*x, causal=causal)


def penalty(function: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """The gradients of a penalty on gradients."""
    leaves = [x.detach().requires_grad_() for x in given]
    first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    loss = sum((x.double().square().sum() for x in first), start=torch.zeros(()))
    return list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (BF16, 0.03)])
def test_second_derivatives_are_torchs(case: str, dtype: torch.dtype, tolerance: float) -> None:
    *sizes, causal = CASES[case]
    given = tensors(*sizes, dtype=dtype)
    wanted = penalty(torchs(causal), [x.double() for x in given])
    for mine, truth in zip(penalty(ours(causal), given), wanted, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - truth).norm() <= tolerance * truth.norm()


@pytest.mark.parametrize("case", CASES)
def test_forward_mode_and_transforms_are_torchs(case: str) -> None:
    *sizes, causal = CASES[case]
    given = tensors(*sizes, dtype=torch.float64)
    torch.manual_seed(1)
    along = tuple(torch.randn_like(x) for x in given)

    def derivatives(function: Callable[..., Tensor]) -> list[Any]:
        every = (0, 1, 2)

        def summed(*x: Tensor) -> Tensor:
            return function(*x).square().sum()

        several = [torch.stack([x, 2 * x]) for x in given]
        return [
            torch.func.jvp(function, tuple(given), along)[1],
            *torch.func.grad(summed, every)(*given),
            *torch.func.jvp(torch.func.grad(summed, every), tuple(given), along)[1],
            *torch.func.vmap(torch.func.grad(summed, every))(*several),
        ]

    for mine, theirs in zip(derivatives(ours(causal)), derivatives(torchs(causal)), strict=True):
        assert theirs.any()
        torch.testing.assert_close(mine, theirs)


def test_below_the_mode() -> None:
    """What is redirected in bf16 has second derivatives, and what cannot be is left to torch."""
    given = tensors(2, 2, 6, 6, dtype=BF16)
    wanted = penalty(torchs(True), [x.double() for x in given])

    def redirected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with FastAttention():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with sdpa_kernel(SDPBackend.MATH):
        for mine, truth in zip(penalty(redirected, given), wanted, strict=True):
            assert (mine.double() - truth).norm() <= 0.03 * truth.norm()
        along = tuple(torch.ones_like(x) for x in given)
        leaves = tuple(x.requires_grad_() for x in given)
        found = torch.func.jvp(redirected, leaves, along)[1]
        plain = torch.func.jvp(torchs(True), leaves, along)[1]
    assert found.any()
    torch.testing.assert_close(found, plain, rtol=0.05, atol=0.05)
