"""Linear layers of float8 weights and activations: the formula, and what accelerators run of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.linear import fp8, linear_fp8, reference
from lezero.ops.quantize import Grid, quantize
from lezero.ops.quantize.tokens import fp8_tokens
from tests.ops.conformance import Args, OpConformance

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NEAR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Of a product whose factors were rounded to such values first."""
SHAPES = [(1, 5, 70), (17, 33, 64), (3, 16, 1), (40, 48, 304)]
"""M, N, K."""


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def coded(N: int, K: int) -> tuple[Tensor, Tensor]:
    codes, scale, _ = quantize(seeded(N, K, seed=N + K), Grid("fp8"))
    return codes, scale


def tokens(M: int, K: int, dtype: torch.dtype, below: float = 1.0) -> Tensor:
    """Of each 10 tokens one of zeros, one with NaNs, one with an infinity, two of tiny values and
    one of huge ones, the largest there are over `below`."""
    x = seeded(M, K).to(dtype)
    most = torch.finfo(dtype).max / below
    for row in range(0, M, 10):
        x[row + 1 : row + 2] = 0
        x[row + 2 : row + 3, K // 2 :] = torch.nan
        x[row + 3 : row + 4, :1] = -torch.inf
        x[row + 4 : row + 5] = x[row + 4 : row + 5].sign() * most
        x[row + 5 : row + 6] *= 1e-3
        x[row + 6 : row + 7] *= 1e-38
    return x


class TestFp8(OpConformance):
    """x, codes, scale, bias."""

    def cases(self) -> Iterator[tuple[str, Args]]:
        weight = coded(33, 70)
        yield "random", (seeded(2, 3, 70), *weight, seeded(33))
        for M, N, K in SHAPES:
            yield f"ragged {M} {N} {K}", (seeded(M, K), *coded(N, K), None)
        yield "empty", (seeded(0, 70), *weight, seeded(33))
        for dtype in FLOATS:
            yield f"nan, inf, zeros {dtype}", (tokens(10, 70, dtype), *weight, seeded(33))
        yield "inf", (seeded(70) / 0, *weight, None)

    def expected(self, x: Tensor, codes: Tensor, scale: Tensor, bias: Any) -> tuple[Tensor, ...]:
        flat = x.reshape(-1, 70) if not x.numel() else x.reshape(-1, x.shape[-1])
        out = reference.linear_fp8(flat, codes, scale, bias)
        return (out.view(*x.shape[:-1], len(codes)),)

    def public(self, *args: Any) -> tuple[Tensor, ...]:
        return (linear_fp8(*args),)

    def test_strided_inputs(self) -> None:
        codes, scale = coded(33, 70)
        x = seeded(6, 140)[:, ::2]
        assert torch.equal(linear_fp8(x, codes, scale), linear_fp8(x.contiguous(), codes, scale))
        with pytest.raises(ConfigError, match="contiguous"):
            linear_fp8(seeded(2, 33), codes.T, scale)


def error(found: Tensor, wanted: Tensor) -> float:
    """The worst row's relative error; infinite where they are not NaN alike."""
    found, wanted = found.double(), wanted.double()
    if not torch.equal(found.isnan(), wanted.isnan()):
        return torch.inf
    wrong, size = ((x.nan_to_num(0.0)).norm(dim=-1) for x in (found - wanted, wanted))
    return float((wrong / size.clamp(min=1e-300)).max())


@pytest.mark.parametrize("dtype", FLOATS)
def test_tokens_become_the_nearest_points(dtype: torch.dtype) -> None:
    x = tokens(10, 300, dtype)
    codes, scale = fp8_tokens(x)
    assert codes.dtype == torch.float8_e4m3fn
    assert scale[[2, 3]].isnan().all()
    assert not codes[[1, 2, 3]].float().any()
    assert scale[1] == 0
    usual = [row for row in range(10) if row not in (1, 2, 3, 6)]
    assert (codes[usual].float().abs().amax(1) == 448).all()
    wide = x[usual].float() / scale[usual, None]
    # Half a step of 3 bits, or of the smallest numbers.
    bound = torch.maximum(wide.abs() / 16, torch.tensor(2.0**-10)) * (1 + 1e-5)
    assert ((codes[usual].float() - wide).abs() <= bound).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_it_is_near_the_float_layer(dtype: torch.dtype) -> None:
    x, (codes, scale), bias = seeded(20, 256).to(dtype), coded(48, 256), seeded(48).to(dtype)
    found = linear_fp8(x, codes, scale, bias)
    assert found.dtype == dtype
    wanted = x.float() @ (codes.float() * scale).T + bias.float()
    assert 0 < (found - wanted).norm() / wanted.norm() < 0.04
    a, t = fp8_tokens(x)
    exact = (a.double() @ codes.double().T) * t[:, None] * scale.T + bias.double()
    assert error(found, exact) < NEAR[dtype]


def scaled_mm(
    a: Tensor,
    b: Tensor,
    *,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
) -> Tensor:
    """What torch's product is on a device with units for float8, and what it asks for."""
    (M, K), N = a.shape, b.shape[1]
    assert K % 16 == N % 16 == 0
    assert a.is_contiguous()
    assert b.T.is_contiguous()
    assert (scale_a.shape, scale_b.shape) == ((M, 1), (1, N))
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    assert bias is None or bias.dtype == out_dtype == torch.bfloat16
    out = (a.float() @ b.float()) * (scale_a * scale_b)
    return (out if bias is None else out + bias.float()).to(out_dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
def test_the_product_of_accelerators_is_near_the_reference(
    dtype: torch.dtype, bias: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    x, (codes, scale) = tokens(20, 96, dtype, 1024), coded(48, 96)
    given = None if bias is None else seeded(48).to(bias)
    found = fp8.product(x, codes, scale, given)
    assert found.dtype == dtype
    wanted = reference.linear_fp8(x, codes, scale, given)
    assert error(found, wanted) < NEAR[dtype]
    assert found[[2, 3, 12, 13]].isnan().all()


def test_what_does_not_multiply_float8_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise ValueError("only bf16 here\nat line 7")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    fp8._multiplies_fp8.cache_clear()
    place = torch.device("cpu")
    with caplog.at_level(logging.INFO, "lezero.ops"):
        assert not fp8._multiplies_fp8(place, torch.float32)
        assert not fp8._multiplies_fp8(place, torch.float32)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "float8 to torch.float32 on cpu (only bf16 here): " in said
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    assert fp8._multiplies_fp8(place, torch.bfloat16)
    fp8._multiplies_fp8.cache_clear()


@pytest.mark.parametrize(
    ("sizes", "way"),
    [((3, 48, 96), "product"), ((3, 40, 96), "reference"), ((3, 48, 90), "reference")],
)
def test_the_op_takes_the_product_where_it_fits(
    sizes: tuple[int, int, int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    M, N, K = sizes
    seen: list[str] = []

    def spy(name: str) -> Any:
        def run(x: Tensor, *_: Any) -> Tensor:
            seen.append(name)
            return x.new_empty(len(x), N)

        return run

    monkeypatch.setattr(fp8, "product", spy("product"))
    monkeypatch.setattr(reference, "linear_fp8", spy("reference"))
    monkeypatch.setattr(fp8, "_multiplies_fp8", lambda *_: True)
    codes, scale = (part.to("meta") for part in coded(N, K))
    out = fp8._linear(torch.empty(2, M, K, device="meta"), codes, scale, None)
    assert tuple(out.shape) == (2, M, N)
    assert seen == [way]


def test_gradients_are_those_of_the_dequantized_weight() -> None:
    codes, scale = coded(33, 70)
    x, bias = seeded(4, 70).requires_grad_(), seeded(33).requires_grad_()
    grad = seeded(4, 33, seed=1)
    linear_fp8(x, codes, scale, bias).backward(grad)
    torch.testing.assert_close(x.grad, grad @ (codes.float() * scale))
    torch.testing.assert_close(bias.grad, grad.sum(0))


def test_it_compiles_without_a_break() -> None:
    codes, scale = coded(33, 70)
    call = torch.compile(linear_fp8, fullgraph=True, backend="aot_eager")
    x = seeded(2, 4, 70)
    assert torch.equal(call(x, codes, scale, seeded(33)), linear_fp8(x, codes, scale, seeded(33)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": seeded(4, 71)}, "x is"),
        ({"x": seeded(4, 70).double()}, "x is"),
        ({"codes": torch.zeros(33, 70)}, "codes are"),
        ({"scale": seeded(33)}, "scale is"),
        ({"scale": seeded(33, 1).half()}, "scale is"),
        ({"bias": seeded(32)}, "bias is"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Tensor], named: str) -> None:
    codes, scale = coded(33, 70)
    given: dict[str, Any] = {"x": seeded(4, 70), "codes": codes, "scale": scale, **change}
    with pytest.raises(ConfigError, match=named):
        linear_fp8(**given)
