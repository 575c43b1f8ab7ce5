"""Linear layers on packed weights: every kernel equals the reference, int8 and int4 bit for bit."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.linear import (
    Packed,
    linear_bf16,
    linear_int,
    native,
    pack,
    pack_bf16,
    reference,
    unpack,
    unpack_bf16,
)
from lezero.ops.quantize import Grid, dequantize, quantize
from tests.ops.conformance import Args, OpConformance

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
REAL = [(576, 1536), (576, 576), (192, 576), (384, 1536), (768, 768), (3072, 768)]
"""Outputs and inputs of layers of SmolLM2, MiniLM and BERT."""


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(N: int, K: int, bits: int, group: int, zero: bool, dtype: torch.dtype) -> Packed:
    grid = Grid("int4" if bits == 4 else "int8", group or "row", zero)
    codes, scale, at = quantize(seeded(N, K, seed=N + K), grid)
    return pack(codes, scale.to(dtype), None if at is None else at.to(dtype), bits=bits)


def spoiled(M: int, K: int, value: float) -> Tensor:
    x = seeded(M, K)
    x[M // 2, K // 2] = value
    return x


class TestInt(OpConformance):
    """x, weight, scale, zero, bias, x_scale, outputs, bits, group, x_bits, x_block."""

    native = native.NATIVE

    def cases(self) -> Iterator[tuple[str, Args]]:
        def case(M: int, N: int, K: int, bits: int, group: int, x_bits: int, **more: Any) -> Args:
            x = more.get("x", seeded(M, K)).to(more.get("dtype", torch.float32))
            weight = packed(
                N, K, bits, group, more.get("zero", False), more.get("scale", FLOATS[0])
            )
            bias = seeded(N) if more.get("bias") else None
            rest = (N, bits, group, x_bits, more.get("x_block", 0))
            return (x, *weight, bias, more.get("x_scale"), *rest)

        yield "random", case(5, 40, 96, 4, 32, 16, bias=True)
        for bits in (4, 8):
            for x_bits in (8, 16):
                for group in (0, 32, 64, 128, 96, 256):
                    for zero in (False, True):
                        args = case(7, 50, 300, bits, group, x_bits, zero=zero, bias=zero)
                        yield f"random {bits} {x_bits} {group} {zero}", args
                for dtype in FLOATS:
                    args = case(3, 33, 70, bits, 32, x_bits, dtype=dtype, scale=dtype, zero=True)
                    yield f"random {bits} {x_bits} {dtype}", args
                for M, N, K in ((1, 1, 1), (2, 16, 64), (15, 17, 65), (29, 33, 31), (70, 31, 129)):
                    yield f"ragged {bits} {x_bits} {M}", case(M, N, K, bits, 0, x_bits)
                    yield f"ragged {bits} {x_bits} {M} 32", case(M, N, K, bits, 32, x_bits)
                yield f"empty {bits} {x_bits}", case(0, 20, 40, bits, 0, x_bits, bias=True)
                for bad in (math.nan, math.inf, -math.inf):
                    args = case(9, 20, 150, bits, 64, x_bits, x=spoiled(9, 150, bad))
                    yield f"{'nan' if bad != bad else 'inf'} {bits} {x_bits}", args
                for scale in (0.0, 1e-40, 1e38):
                    args = case(3, 20, 64, bits, 0, x_bits, x=seeded(3, 64).clamp(-3, 3) * scale)
                    yield f"random {bits} {x_bits} × {scale}", args
            for bad in (1.0, math.nan, math.inf):
                x_scale = torch.tensor([0.02])
                args = case(6, 20, 80, bits, 0, 8, x=spoiled(6, 80, bad), x_scale=x_scale)
                yield f"random static {bits} {bad}", args
            for group in (0, 32, 64, 128, 96):
                for M, N, K in ((1, 50, 300), (7, 33, 129), (29, 20, 64)):
                    more = {"zero": M > 1, "bias": M > 1}
                    for size in (size for size in (128, 64, 32) if group % size == 0):
                        args = case(M, N, K, bits, group, 8, x_block=size, **more)
                        yield f"ragged blocks {bits} {M} {group} {size}", args
            for bad in (math.nan, math.inf):
                args = case(9, 20, 150, bits, 32, 8, x=spoiled(9, 150, bad), x_block=32)
                yield f"{'nan' if bad != bad else 'inf'} blocks {bits}", args
            yield f"empty blocks {bits}", case(0, 20, 40, bits, 32, 8, x_block=32)
        yield "random, more tokens than are prepared at a time", case(300, 40, 64, 8, 0, 8)
        draw = random.Random(0)
        for _ in range(40):
            M, N, K = (draw.randint(1, 300) for _ in range(3))
            bits, group = draw.choice([4, 8]), draw.choice([0, 32, 64, 128])
            x_bits, x_block = draw.choice([(8, 0), (8, 32), (16, 0)])
            more = {"dtype": draw.choice(FLOATS), "zero": draw.random() < 0.5, "bias": M % 2 == 0}
            more["x_block"] = x_block
            args = case(M, N, K, bits, group, x_bits, **more)
            yield f"ragged {M} {N} {K} {bits} {group} {x_bits} {more}", args

    def expected(self, x: Tensor, w: Tensor, s: Tensor, z: Tensor | None, *rest: Any) -> Any:
        return (reference.linear_int(x, Packed(w, s, z), *rest),)

    def kernel(self, ops: Any, *args: Any) -> tuple[Tensor, ...]:
        return (ops.linear_int(*args),)

    def public(
        self, x: Tensor, w: Tensor, s: Tensor, z: Tensor | None, bias: Tensor | None,
        x_scale: Tensor | None, N: int, bits: int, group: int, x_bits: int, x_block: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        sizes = {"out_features": N, "bits": bits, "group": group}
        # Weights are packed, so always contiguous.
        weight = Packed(w.contiguous(), s.contiguous(), z if z is None else z.contiguous())
        form: Any = {"x_scale": x_scale, "x_bits": x_bits, "x_block": x_block}
        return (linear_int(x, weight, bias, **sizes, **form),)


class TestBf16(OpConformance):
    """x, weight, bias, outputs. Sums of bf16 products in another order: near, not equal."""

    native = native.NATIVE
    rtol, atol = 1e-2, 2e-2

    def cases(self) -> Iterator[tuple[str, Args]]:
        for dtype in FLOATS:
            for M, N, K in ((5, 40, 96), (1, 1, 1), (29, 33, 31), (70, 31, 129), (300, 20, 64)):
                kind = "random" if K == 96 else "ragged"
                yield (
                    f"{kind} {dtype}",
                    (seeded(M, K).to(dtype), pack_bf16(seeded(N, K)), seeded(N), N),
                )
            yield f"empty {dtype}", (seeded(0, 40).to(dtype), pack_bf16(seeded(9, 40)), None, 9)
            for name, bad in (("nan", math.nan), ("inf", math.inf)):
                x = spoiled(9, 50, bad).to(dtype)
                yield f"{name} {dtype}", (x, pack_bf16(seeded(20, 50)), None, 20)

    def expected(self, *args: Any) -> tuple[Tensor, ...]:
        return (reference.linear_bf16(*args),)

    def kernel(self, ops: Any, *args: Any) -> tuple[Tensor, ...]:
        return (ops.linear_bf16(*args),)

    def public(self, x: Tensor, w: Tensor, bias: Tensor | None, N: int) -> tuple[Tensor, ...]:
        return (linear_bf16(x, w.contiguous(), bias, out_features=N),)


@pytest.mark.parametrize(("bits", "group", "zero"), [(8, 0, False), (4, 64, False), (4, 32, True)])
@pytest.mark.parametrize(("N", "K"), REAL)
def test_real_shapes(N: int, K: int, bits: int, group: int, zero: bool) -> None:
    weight, x = packed(N, K, bits, group, zero, torch.float32), seeded(3, K)
    for x_bits in (8, 16):
        found = linear_int(x, weight, out_features=N, bits=bits, group=group, x_bits=x_bits)
        wanted = reference.linear_int(x, weight, None, None, N, bits, group, x_bits)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sixteen_bit_activations_are_as_good_as_the_plain_formula(dtype: torch.dtype) -> None:
    N, K, grid = 100, 500, Grid("int4", 64, True)
    codes, scale, zero = quantize(seeded(N, K), grid)
    x = seeded(20, K, seed=1).to(dtype)
    wanted = x.double() @ dequantize(codes, scale, zero, grid).double().T
    found = linear_int(
        x.float(), pack(codes, scale, zero, bits=4), out_features=N, bits=4, group=64
    )
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    plain = linear_bf16(x.float(), pack_bf16(seeded(N, K)), out_features=N)
    wanted = x.double() @ seeded(N, K).bfloat16().double().T
    assert (plain - wanted).abs().max() < 2e-4 * wanted.abs().max()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("x_bits", "x_block"), [(8, 0), (8, 32), (8, 64), (16, 0)])
def test_a_token_does_not_depend_on_its_batch(bits: int, x_bits: int, x_block: int) -> None:
    weight, x = packed(50, 200, bits, 64, False, torch.float32), seeded(40, 200)
    sizes = {"out_features": 50, "bits": bits, "group": 64, "x_bits": x_bits, "x_block": x_block}
    whole = linear_int(x, weight, **sizes)  # type: ignore[arg-type]
    assert all(torch.equal(linear_int(x[i], weight, **sizes), whole[i]) for i in range(40))  # type: ignore[arg-type]


@pytest.mark.parametrize(("N", "K"), [(50, 200), (2100, 1100)])
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("tokens", [128, 777])
def test_many_tokens_equal_few(N: int, K: int, bits: int, tokens: int) -> None:
    x = seeded(tokens, K)
    if bits == 16:
        weight, parts = pack_bf16(seeded(N, K)), x.split(50)
        whole = linear_bf16(x, weight, out_features=N)
        few = torch.cat([linear_bf16(part, weight, out_features=N) for part in parts])
    else:
        codes = packed(N, K, bits, 0, False, torch.float32)
        sizes: Any = {"out_features": N, "bits": bits, "x_bits": 8}
        whole = linear_int(x, codes, **sizes)
        few = torch.cat([linear_int(part, codes, **sizes) for part in x.split(50)])
    assert torch.equal(whole, few)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (16, 64), (33, 300), (47, 63)])
def test_packing_comes_back_bit_for_bit(bits: int, zero: bool, N: int, K: int) -> None:
    codes, scale, at = quantize(seeded(N, K), Grid("int4" if bits == 4 else "int8", 32, zero))
    found = unpack(pack(codes, scale, at, bits=bits), N, K, bits=bits, group=32)
    assert torch.equal(found.weight, codes)
    assert torch.equal(found.scale, scale)
    assert found.zero is None or torch.equal(found.zero, at)  # type: ignore[arg-type]
    weight = seeded(N, K).bfloat16()
    assert torch.equal(unpack_bf16(pack_bf16(weight), N, K), weight)


def test_leading_dims_and_strides() -> None:
    weight, x = packed(20, 60, 8, 0, False, torch.float32), seeded(4, 60, 6).transpose(1, 2)
    found = linear_int(x, weight, out_features=20, bits=8)
    flat = linear_int(x.reshape(-1, 60), weight, out_features=20, bits=8)
    assert torch.equal(found, flat.view(4, 6, 20))
    assert linear_int(x[:0], weight, out_features=20, bits=8).shape == (0, 6, 20)


@pytest.mark.parametrize("x_bits", [8, 16])
def test_gradients_are_those_of_the_dequantized_weight(x_bits: int) -> None:
    codes, scale, zero = quantize(seeded(20, 70), Grid("int4", 32, True))
    weight = pack(codes, scale, zero, bits=4)
    x, bias = seeded(2, 3, 70).requires_grad_(), seeded(20).requires_grad_()
    linear_int(
        x, weight, bias, out_features=20, bits=4, group=32, x_bits=x_bits
    ).square().sum().backward()
    wide, out = dequantize(codes, scale, zero, Grid("int4", 32, True)), None
    out = linear_int(
        x.detach(), weight, bias.detach(), out_features=20, bits=4, group=32, x_bits=x_bits
    )
    torch.testing.assert_close(x.grad, 2 * out @ wide, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(bias.grad, 2 * out.sum((0, 1)), rtol=1e-4, atol=1e-3)
    x.grad = None
    linear_bf16(x, pack_bf16(wide), out_features=20).sum().backward()
    torch.testing.assert_close(x.grad, wide.bfloat16().float().sum(0).expand(2, 3, 70))


def test_torch_knows_the_ops() -> None:
    x, w, ids = seeded(2, 3, 70), packed(20, 70, 4, 32, True, torch.float16), torch.arange(4)
    check, ops = torch.library.opcheck, torch.ops.lezero
    check(ops.linear_int.default, (x, *w, seeded(20), None, 20, 4, 32, 8))
    check(ops.linear_bf16.default, (x.requires_grad_(), pack_bf16(seeded(20, 70)), None, 20))
    check(ops.embedding_int.default, (ids, *w, 70, 4, 32, torch.bfloat16, 20))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, x in packed(20, 70, 4, 32, True, torch.float32)._asdict().items():
            self.register_buffer(name, x)

    def forward(self, x: Tensor) -> Tensor:
        weight = Packed(self.weight, self.scale, self.zero)  # type: ignore[arg-type]
        return linear_int(x, weight, out_features=20, bits=4, group=32, x_bits=8).relu()


def test_compile_and_export() -> None:
    layer, x = Layer(), seeded(5, 70)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    tokens = torch.export.Dim("tokens", max=64)
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: tokens},)).module()
    with torch.no_grad():
        for some in (x, x[:3]):
            assert torch.equal(compiled(some), layer(some))
            assert torch.equal(exported(some), layer(some))


def test_the_formula_runs_where_no_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = packed(20, 70, 4, 32, False, torch.float32), seeded(2, 3, 70)
    found = linear_int(x, weight, out_features=20, bits=4, group=32)
    monkeypatch.setattr(native.NATIVE, "_loaded", False)
    assert torch.equal(linear_int(x, weight, out_features=20, bits=4, group=32), found)
    assert linear_bf16(x, pack_bf16(seeded(20, 70)), out_features=20).shape == (2, 3, 20)


W = packed(20, 70, 4, 32, False, torch.float32)


@pytest.mark.parametrize(
    ("x", "weight", "sizes", "said"),
    [
        (seeded(2, 129), W._replace(scale=torch.ones(2, 5, 16)), {}, "at most 128"),
        (seeded(2, 64), W, {}, "groups of 32"),
        (seeded(2, 70).double(), W, {}, "float64"),
        (seeded(2, 70), W, {"out_features": 33}, "for 33 outputs"),
        (seeded(2, 70), W, {"group": 64}, "groups of 64"),
        (seeded(2, 70), W, {"group": 40}, r"groups of 32 · n"),
        (seeded(2, 70), W, {"group": "row"}, "group is 'row'; allowed are 0, for a scale a row"),
        (seeded(2, 70), W, {"group": None}, "group is None; allowed are 0"),
        (seeded(2, 70), W, {"bits": 3}, "3 bits"),
        (seeded(2, 70), W._replace(scale=torch.ones(2, 0, 16)), {"group": 2**63 - 32}, "scale is"),
        (seeded(2, 70), W, {"bias": torch.ones(1, 20)}, "bias is"),
        (seeded(2, 70), W, {"x_bits": 4}, "x_bits is 4"),
        (seeded(2, 70), W._replace(scale=W.scale.double()), {}, "scale is torch.float64"),
        (seeded(2, 70), W._replace(weight=W.weight[:, ::2]), {}, "contiguous"),
    ],
)
def test_what_does_not_fit_is_named(x: Tensor, weight: Packed, sizes: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        linear_int(x, weight, **{"out_features": 20, "bits": 4, "group": 32, **sizes})
    with pytest.raises(ConfigError, match=said):  # by the dispatcher
        linear_int(
            x.requires_grad_(), weight, **{"out_features": 20, "bits": 4, "group": 32, **sizes}
        )


def test_inputs_of_other_widths_meet_the_first_of_the_weight() -> None:
    x = seeded(2, 128)
    weight = packed(20, 100, 4, 64, True, torch.float32)
    narrow, filled = x[:, :70], torch.nn.functional.pad(x[:, :70], (0, 30))
    sizes = {"out_features": 20, "bits": 4, "group": 64}
    assert torch.equal(linear_int(narrow, weight, **sizes), linear_int(filled, weight, **sizes))
    wide = pack_bf16(seeded(20, 100))
    found, wanted = (linear_bf16(x[:, :K].contiguous(), wide, out_features=20) for K in (128, 100))
    assert torch.equal(found, wanted)


def test_a_weight_without_inputs_is_refused() -> None:
    weight = Packed(torch.zeros(1, 0, 16, 4, dtype=torch.uint8), torch.ones(1, 1, 16), None)
    with pytest.raises(ConfigError, match=r"linear_int: x is"):
        linear_int(torch.zeros(2, 0), weight, out_features=16, bits=8)
    empty = torch.zeros(1, 0, 16, 2, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"linear_bf16: x is"):
        linear_bf16(torch.zeros(2, 0), empty, out_features=16)


def test_packing_refuses_what_it_cannot_keep() -> None:
    codes, scale = torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 1)
    with pytest.raises(ConfigError, match="codes of 4 bits"):
        pack(codes, scale, None, bits=4)
    with pytest.raises(ConfigError, match="groups"):
        pack(codes, torch.ones(3, 1), None, bits=8)
    with pytest.raises(ConfigError, match="float64"):
        pack(codes, scale.double(), None, bits=8)
    with pytest.raises(ConfigError, match="bias is"):
        linear_bf16(seeded(2, 8), pack_bf16(seeded(4, 8)), torch.ones(5), out_features=4)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_weight_whose_depth_is_not_whole_is_refused(bits: int) -> None:
    x, depth = torch.zeros(1, 32), 4 if bits == 4 else 8
    codes = torch.zeros(2, depth, 16, 4, dtype=torch.uint8)
    half = torch.zeros(2, 8, 16, 2, dtype=torch.bfloat16)

    def call() -> Tensor:
        if bits == 16:
            return linear_bf16(x[:, :16], half, out_features=32)
        packed = Packed(codes, torch.ones(2, 1, 16), None)
        return linear_int(x, packed, out_features=32, bits=bits)

    with pytest.raises(ConfigError, match="allowed is what pack gave"):
        call()
