"""Kernels in CUDA C++ for few tokens, against fp64: on an NVIDIA GPU, and a part of the cases on a
processor in its stead."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from lezero.core import device
from lezero.ops import cuda_source
from lezero.ops.decoder import cuda_step
from lezero.ops.linear import Packed, cuda_few, reference, to_rows
from lezero.serve.captured import best_token
from tests.ops.test_linear import packed, seeded

ON_GPU = device.accelerator() == "cuda"
SIZES = [(1, 40, 512), (3, 34, 96), (16, 64, 1024), (5, 48, 704), (9, 50, 320), (1, 130, 2048)]
SIZES += [(13, 96, 4096)]
"""M, N, K: steps whole and ragged, of every number of warps."""
NEAR = {torch.bfloat16: 6e-3, torch.float16: 8e-4}
BF16, FP16 = NEAR
FORMS = [(16, 0, False)]
FORMS += itertools.product((8,), (0, 64, 128, 256, 512), (False, True))
FORMS += itertools.product((4,), (0, 32, 64, 128, 256, 512), (False, True))
EPS = 1e-5
# Of all cases: a processor takes some seconds for each, most of them the compiler's.
CASES = list(itertools.product(FORMS, SIZES, NEAR))[:: 1 if ON_GPU else 23]
AROUND = list(
    itertools.product([(16, 0, False), (8, 0, False), (4, 64, True)], (1, 2, 8, 11, 16), NEAR)
)[:: 1 if ON_GPU else 13]


def compile_together(
    tests: Iterable[tuple[Callable[..., None], Mapping[str, Any]]], place: torch.device
) -> None:
    """Compiles what these tests ask for, with all processors. What does not compile is left to its
    test."""
    asked = set[tuple[Any, ...]]()
    nothing = SimpleNamespace(launch=lambda *given, **named: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_source, "_kernel", lambda *variant: asked.add(variant) or nothing)
        for test, given in tests:
            with suppress(AssertionError):  # of what nobody computed
                test(**given, cuda_place=place)

    def compiled(variant: tuple[Any, ...]) -> None:
        with suppress(RuntimeError):
            cuda_source._kernel(*variant)

    with ThreadPoolExecutor() as pool:
        list(pool.map(compiled, asked))


@pytest.fixture(scope="module", autouse=True)
def compiled_together(request: pytest.FixtureRequest) -> None:
    """On a GPU: a variant takes the compiler 0.3 s, and all cases have some 900."""
    if ON_GPU:
        own: Any = [x for x in request.session.items if x.path == request.path]
        tests = [(x.obj, x.callspec.params) for x in own if "form" in x.fixturenames]
        compile_together(tests, device.device())


def made(
    N: int, K: int, bits: int, group: int, zero: bool, dtype: torch.dtype, place: torch.device
) -> tuple[Packed, Tensor]:
    """As kernels read it, and what it stands for, in fp64."""
    if bits == 16:
        weight = seeded(N, K, seed=N).to(dtype).to(place)
        return Packed(weight, weight, None), weight.double()
    kept = torch.float16 if bits == 4 else torch.float32
    rows = to_rows(packed(N, K, bits, group, zero, kept), N, K, bits, group)
    zeros = None if rows.zero is None else rows.zero.to(place)
    there = Packed(rows.weight.to(place), rows.scale.to(place), zeros)
    return there, reference.dequantize_packed(there, N, K, bits, group).double()


def apart(x: Tensor, M: int) -> Tensor:
    """(M, K) of tokens that lie in slices."""
    return x[:, :M].transpose(0, 1).flatten(1)


def away(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("form", "size", "dtype"), CASES, ids=str)
def test_products(
    form: tuple[int, int, bool],
    size: tuple[int, int, int],
    dtype: torch.dtype,
    cuda_place: torch.device,
) -> None:
    (M, N, K), (bits, group, zero), place = size, form, cuda_place
    assert cuda_few.suits(dtype, K, bits, group)
    weight, wide = made(N, K, bits, group, zero, dtype, place)
    x, bias = (t.to(dtype).to(place) for t in (seeded(M, K), seeded(N, seed=3)))
    wanted = x.double() @ wide.T + bias.double()
    sizes = (N, K, bits, group)
    late, found = (
        cuda_few.linear_few(cuda_few.sliced(x), M, weight, bias, *sizes, early=early)
        for early in (False, True)
    )
    alone = cuda_few.linear_few(cuda_few.sliced(x[:1]), 1, weight, bias, *sizes)
    assert away(late, wanted) < NEAR[dtype]
    assert away(found, wanted) < NEAR[dtype]
    assert torch.equal(alone, found[:1])


@pytest.mark.parametrize(("form", "M", "dtype"), AROUND, ids=str)
def test_what_stands_around_them(
    form: tuple[int, int, bool], M: int, dtype: torch.dtype, cuda_place: torch.device
) -> None:
    (N, K), (bits, group, zero), place = (96, 512), form, cuda_place
    weight, wide = made(N, K, bits, group, zero, dtype, place)
    x, residual = (t.to(dtype).to(place) for t in (seeded(M, K), seeded(M, N, seed=2)))
    norm = (seeded(K, seed=1).abs() + 0.5).to(dtype).to(place)
    sizes = (N, K, bits, group)
    spread = cuda_step.spread(x, norm)
    normed = cuda_few.linear_few(spread, M, weight, None, *sizes, eps=EPS)
    gated = cuda_few.linear_few(spread, M, weight, None, *sizes, eps=EPS, gated=True)
    tokens, into = cuda_few.sliced(x), norm[:N]
    out, following = cuda_few.linear_normed(tokens, M, weight, None, *sizes, residual, into)
    scaled = (x.float() * norm.float()).to(dtype)
    assert torch.equal(apart(spread.tokens, M), scaled)
    torch.testing.assert_close(spread.squares.sum(0), x.float().square().sum(1))
    factor = torch.rsqrt(x.double().square().mean(1, keepdim=True) + EPS)
    wanted = (scaled.double() * factor) @ wide.T
    assert away(normed, wanted) < NEAR[dtype]
    gate, up = wanted.to(dtype).double().chunk(2, 1)
    assert away(apart(gated, M), silu(gate) * up) < 2 * NEAR[dtype]
    assert away(out, x.double() @ wide.T + residual.double()) < NEAR[dtype]
    assert torch.equal(apart(following.tokens, M), (out.float() * into.float()).to(dtype))
    torch.testing.assert_close(following.squares.sum(0), out.float().square().sum(1))


def test_all_that_a_test_asks_for_is_compiled_before(
    monkeypatch: pytest.MonkeyPatch, cuda_place: torch.device
) -> None:
    compiled = list[tuple[Any, ...]]()
    monkeypatch.setattr(cuda_source, "_kernel", lambda *variant: compiled.append(variant))
    products = dict(zip(("form", "size", "dtype"), CASES[0], strict=True))
    around = dict(zip(("form", "M", "dtype"), AROUND[0], strict=True))
    asking = [(test_products, products), (test_what_stands_around_them, around)]
    compile_together(asking, cuda_place)
    assert len(set(compiled)) == len(compiled)
    # Early and late, of one token; then normed, gated, and with a norm to follow.
    assert sorted(name for _, name, *_ in compiled) == ["few"] * 5 + ["spread"]


@pytest.mark.parametrize(("P", "M"), [(40, 3), (129, 1), (200, 9)])
def test_norms_of_many_parts(P: int, M: int, cuda_place: torch.device) -> None:
    N, K = 48, 512
    weight, wide = made(N, K, 16, 0, False, BF16, cuda_place)
    x = seeded(M, K).to(BF16).to(cuda_place)
    part = torch.rand(P, M, generator=torch.Generator().manual_seed(P)).to(cuda_place) + 0.1
    squares = part / part.sum(0) * x.float().square().sum(1)
    normed = cuda_few.Normed(cuda_few.sliced(x), squares)
    found = cuda_few.linear_few(normed, M, weight, None, N, K, 16, 0, eps=EPS)
    factor = torch.rsqrt(x.double().square().mean(1, keepdim=True) + EPS)
    assert away(found, x.double() * factor @ wide.T) < NEAR[BF16]


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16])
def test_best_tokens(dtype: torch.dtype, cuda_place: torch.device) -> None:
    logits = seeded(9, 5000).to(dtype).to(cuda_place)
    logits[1, 70] = logits[1, 4000] = 50
    logits[2, 9], logits[3, 11], logits[4] = float("nan"), float("inf"), -float("inf")
    logits[5] = -logits[5].abs() - 1
    logits[6], logits[6, 33], logits[6, 5] = -1, -0.0, 0.0
    found = torch.full((9,), 7, device=logits.device)
    for _ in range(2):
        cuda_step.best(logits, found)
        assert torch.equal(found, best_token(logits.float()))


def test_tokens_of_the_step_before(cuda_place: torch.device) -> None:
    inputs = torch.tensor([[5, -1, 0], [6, 2, 0], [7, 0, 0]], device=cuda_place)
    last = torch.tensor([11, 12, -1, 14], device=cuda_place)
    found = cuda_step.chosen(inputs[:, 0], inputs[:, 1], last)
    assert found.tolist() == [5, 0, 11]


@pytest.mark.skipif(not ON_GPU, reason="no CUDA device, so no compiler for it")
def test_a_source_that_does_not_compile_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"does not compile x.cu:\n.*undefined"):
        cuda_source.compiled("__global__ void f() { g(); }", "x.cu", ["--std=c++17"])
