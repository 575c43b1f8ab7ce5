"""The AMX kernel: its logic over emulated instructions, and what happens where they do not run.

The emulation (`amx_tile.h`) does what Intel's manual says of each instruction, and ends the process
where a processor would fault, so that all but the instructions themselves is held to the reference
on processors without them.
"""

from __future__ import annotations

import dataclasses
import math
import random
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.core.facts import instruction_sets
from lezero.ops.build import BuildError
from lezero.ops.linear import Packed, amx, linear_rounded, native, pack_bf16, reference
from lezero.ops.linear.layout import pack, unpack
from lezero.ops.native import Kernel, Native
from tests.ops import test_linear
from tests.ops.conformance import Args, OpConformance, fresh
from tests.ops.test_linear import FLOATS, packed, seeded

AMX = next(kernel for kernel in native.NATIVE.kernels if kernel.name == "amx")
EMULATED = Native(
    "linear",
    [
        Kernel(
            "amx_emulated",
            AMX.needs - amx.INSTRUCTIONS,
            AMX.files,
            (*AMX.flags, "-DLEZERO_AMX_EMULATED"),
        )
    ],
    registration=native.NATIVE.registration,
    otherwise="nothing: it is for tests",
)
needs_avx512 = pytest.mark.skipif(
    not EMULATED.able() or not shutil.which("cc"),
    reason="no AVX-512 here, which the emulation needs, or no compiler",
)


class Bf16(test_linear.TestBf16):
    def cases(self) -> Iterator[tuple[str, Args]]:
        yield from super().cases()
        for dtype in FLOATS:
            for M, N, K in ((16, 300, 700), (17, 33, 513), (40, 20, 256), (5, 600, 100)):
                args = (seeded(M, K).to(dtype) / 8, pack_bf16(seeded(N, K) / 8), None, N)
                yield f"random {dtype} {M} {N} {K}", args


@needs_avx512
@pytest.mark.parametrize("suite", [test_linear.TestInt(), Bf16()], ids=["int", "bf16"])
def test_the_cases_of_every_kernel(suite: OpConformance) -> None:
    ops = EMULATED.load(EMULATED.kernels[0])
    for name, args in suite.cases():
        suite.held(name, suite.kernel(ops, *fresh(args)), suite.expected(*fresh(args)))


@needs_avx512
def test_layers_of_all_shapes() -> None:
    ops, draw = EMULATED.load(EMULATED.kernels[0]), random.Random(0)
    for _ in range(60):
        M, N, K = draw.randint(5, 80), draw.randint(1, 300), draw.randint(1, 900)
        bits, group = draw.choice([4, 8]), draw.choice([0, 32, 64, 96, 128])
        form, dtype = draw.choice([(8, 0), (8, 32), (16, 0)]), draw.choice(FLOATS)
        x, weight = seeded(M, K).to(dtype), packed(N, K, bits, group, draw.random() < 0.3, dtype)
        sizes = (N, bits, group, *form)
        found = ops.linear_int(x, *weight, seeded(N), None, *sizes)
        wanted = reference.linear_int(x, weight, seeded(N), None, *sizes)
        assert torch.equal(found, wanted), (M, K, dtype, sizes)
        bf16, plain = pack_bf16(seeded(N, K)), reference.linear_bf16
        near = 1e-4 if dtype == torch.float32 else 2e-2
        found = ops.linear_bf16(x, bf16, None, N).float()
        torch.testing.assert_close(found, plain(x, bf16, None, N).float(), rtol=near, atol=near)


@needs_avx512
def test_weights_rounded_as_they_are_read() -> None:
    ops, draw = EMULATED.load(EMULATED.kernels[0]), random.Random(1)
    for _ in range(40):
        M, N, K = draw.randint(1, 40), draw.randint(1, 100), draw.randint(1, 700)
        bits, group = draw.choice([4, 8]), draw.choice([0, 32, 64, 96, 128])
        x = seeded(M, K).bfloat16()
        weight = packed(N, K, bits, group, draw.random() < 0.5, draw.choice(FLOATS))
        sizes, bias = (N, bits, group, 16, 0, True), seeded(N)
        found = ops.linear_int(x, *weight, bias, None, *sizes)
        if group:
            whole = pack_bf16(reference.dequantize_packed(weight, N, K, bits, group))
            wanted = ops.linear_bf16(x, whole, bias, N)
        else:  # products with whole codes times a power of two, and the rest on their sums
            power, left = reference.power_apart(weight.scale)
            whole = reference.dequantize_packed(weight._replace(scale=power), N, K, bits, 0)
            sums = ops.linear_bf16(x.float(), pack_bf16(whole), None, N)
            left = unpack(weight._replace(scale=left), N, K, bits=bits, group=0)[1].T
            wanted = (sums * left + bias).bfloat16()
        assert torch.equal(found, wanted), (M, N, K, sizes)
        plain = reference.linear_rounded(x, weight, bias, N, bits, group)
        torch.testing.assert_close(found, plain, rtol=2e-2, atol=2e-2)


@needs_avx512
def test_a_scale_a_row_costs_no_rounding_of_weights() -> None:
    """Which would lose as much again as 8 bits do."""
    ops, N, K = EMULATED.load(EMULATED.kernels[0]), 64, 500
    x, weight = seeded(130, K).bfloat16(), packed(N, K, 8, 0, False, torch.float32)
    found = ops.linear_int(x, *weight, None, None, N, 8, 0, 16, 0, True)
    whole = reference.dequantize_packed(weight, N, K, 8, 0).double()
    exact = (x.double() @ whole.T).float()
    assert (found != exact.bfloat16()).float().mean() < 0.01  # but for sums beside a tie


@needs_avx512
@pytest.mark.parametrize(
    "scale", [0.0, 1e-45, 1e-38, 1e-30, 2.0**-13, 0.011, 3.0, 1e30, 1e34, 1e38]
)
def test_a_scale_of_any_size_is_put_on_the_sums(scale: float) -> None:
    """And sums overflow no earlier than those of the weight itself."""
    ops, N, K = EMULATED.load(EMULATED.kernels[0]), 33, 96
    codes = torch.randint(-127, 128, (N, K), dtype=torch.int8, generator=torch.manual_seed(0))
    codes[5] = 127
    weight = pack(codes, torch.full((N, 1), scale), None, bits=8)
    most = min(1e37, 1e37 / max(scale, 1e-3) / 127 / K)
    x = (seeded(20, K).clamp(-1, 1) * most).bfloat16()
    x[3] = most  # times the largest codes
    found = ops.linear_int(x, *weight, None, None, N, 8, 0, 16, 0, True)
    exact = x.double() @ (codes.double() * torch.tensor(scale).double()).T
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=1e-3 * most * scale)


@needs_avx512
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("K", [600, 70])  # sums in two steps, and in one
def test_outputs_that_no_cache_holds_are_those_of_fewer_tokens(K: int, dtype: torch.dtype) -> None:
    """More than a MiB of them is written in another order."""
    ops, M, N = EMULATED.load(EMULATED.kernels[0]), 70, 8009
    assert M * N * 2 > 1 << 20 > 23 * N * 4
    x, bias, whole = seeded(M, K).to(dtype), seeded(N), pack_bf16(seeded(N, K))
    products = [lambda x: ops.linear_bf16(x, whole, bias, N)]
    for bits, group, x_bits, zero in ((8, 0, 8, False), (4, 64, 8, True), (4, 32, 16, False)):
        for rounded in (False, True) if x_bits == 16 and dtype == torch.bfloat16 else (False,):
            weight = packed(N, K, bits, group, zero, torch.float16)
            given = (*weight, bias, None, N, bits, group, x_bits, 0, rounded)
            products.append(lambda x, given=given: ops.linear_int(x, *given))
    for product in products:
        assert torch.equal(product(x), torch.cat([product(part) for part in x.split(23)]))


FORMS = [  # bits, group, x_bits, x_block, zero points; from how many tokens on bf16 pays
    (8, 0, 8, 0, False, None),
    (4, 128, 8, 0, False, None),
    (8, 64, 8, 0, False, 192),
    (4, 32, 8, 0, True, 64),
    (8, 64, 8, 32, False, 64),
    (8, 0, 16, 0, False, 128),
    (4, 64, 16, 0, True, 64),
]


@needs_avx512
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_many_tokens_are_rounded_where_they_may_be(form: tuple[Any, ...]) -> None:
    ops, (bits, group, x_bits, x_block, zero, pays) = EMULATED.load(EMULATED.kernels[0]), form
    N, K = 40, 192
    weight, sizes = (
        packed(N, K, bits, group, zero, torch.float16),
        (N, bits, group, x_bits, x_block),
    )

    def product(x: Tensor, *rounds: bool, x_scale: Tensor | None = None) -> Tensor:
        found: Tensor = ops.linear_int(x, *weight, None, x_scale, *sizes, *rounds)
        return found

    for M in (1, (pays or 300) - 1, pays or 300):
        x = seeded(M, K).bfloat16()
        assert torch.equal(product(x, False, True), product(x, pays == M))
        assert torch.equal(product(x.float(), False, True), product(x.float()))
    if pays:
        assert not torch.equal(product(x, True), product(x))
    if x_bits == 8 and not x_block:  # a scale from the calibration also limits the inputs
        one = torch.tensor([0.01])
        assert torch.equal(product(x, False, True, x_scale=one), product(x, x_scale=one))


def test_other_kernels_round_nothing() -> None:
    weight, x = packed(40, 192, 4, 64, True, torch.float16), seeded(200, 192).bfloat16()
    for kernel in native.NATIVE.able():
        if kernel.name != "amx":
            linear_int = native.NATIVE.load(kernel).linear_int
            given = (x, *weight, None, None, 40, 4, 64, 16, 0, False)
            assert torch.equal(linear_int(*given, True), linear_int(*given))


def test_rounded_products_are_for_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.NATIVE, "kernel_name", lambda: "avx2")
    weight = packed(16, 64, 8, 0, False, torch.float32)
    with pytest.raises(ConfigError, match="needs a CPU with AMX"):
        linear_rounded(torch.ones(1, 64).bfloat16(), weight, None, out_features=16, bits=8)
    with pytest.raises(ConfigError, match="bias"):
        linear_rounded(torch.ones(1, 64).bfloat16(), weight, seeded(3), out_features=16, bits=8)


@needs_avx512
def test_a_bad_token_spoils_no_other_in_its_tile() -> None:
    ops = EMULATED.load(EMULATED.kernels[0])
    x = seeded(20, 100)
    x[3, 7], x[17, 99] = math.nan, math.inf
    bf16 = ops.linear_bf16(x, pack_bf16(seeded(40, 100)), None, 40)
    int4 = ops.linear_int(
        x, *packed(40, 100, 4, 32, False, torch.float32), None, None, 40, 4, 32, 8
    )
    for out in (bf16, int4):
        finite = torch.isfinite(out).all(1)
        assert (~finite).nonzero().flatten().tolist() == [3, 17]


@needs_avx512
def test_the_real_library_has_the_instructions_and_few_tokens_need_none() -> None:
    kernel = dataclasses.replace(AMX, needs=EMULATED.kernels[0].needs, trial=None)
    one = Native("linear", [kernel], registration=native.NATIVE.registration, otherwise="")
    x, weight = seeded(4, 100), packed(20, 100, 8, 0, False, torch.float32)
    found = one.load(kernel).linear_int(x, *weight, None, None, 20, 8, 0, 8)
    assert torch.equal(found, reference.linear_int(x, weight, None, None, 20, 8, 0, 8))
    objdump = shutil.which("objdump") or pytest.skip("no objdump here, which reads the library")
    (library,) = (path for path in torch.ops.loaded_libraries if "linear-amx-" in path)
    read = subprocess.run([objdump, "-d", library], capture_output=True, text=True, check=True)
    for name in ("ldtilecfg", "tileloadd", "tdpbsud", "tdpbf16ps", "tilestored", "tilerelease"):
        assert name in read.stdout


@needs_avx512
def test_a_token_of_bf16_does_not_depend_on_its_batch() -> None:
    ops, weight = EMULATED.load(EMULATED.kernels[0]), pack_bf16(seeded(70, 600))
    for dtype in FLOATS:
        x = seeded(40, 600).to(dtype)
        whole = ops.linear_bf16(x, weight, None, 70)
        for begin, end in ((0, 1), (16, 17), (3, 7), (30, 40)):
            assert torch.equal(ops.linear_bf16(x[begin:end], weight, None, 70), whole[begin:end])


class Ops:
    """The reference as a kernel's ops, one form of it wrong."""

    def __init__(self, wrong: tuple[int, ...] | None) -> None:
        self.wrong = wrong

    def linear_bf16(self, x: Tensor, weight: Tensor, bias: Tensor | None, N: int) -> Tensor:
        return reference.linear_bf16(x, weight, bias, N) + (self.wrong == (16, 16))

    def linear_int(self, x: Tensor, w: Tensor, s: Tensor, z: Tensor | None, *rest: Any) -> Tensor:
        out = reference.linear_int(x, Packed(w, s, z), *rest)
        out[-1, -1] += self.wrong == (rest[3], *rest[5:])
        return out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ((16, 16), "bf16"),
        ((8, 8, 0), "W8A8"),
        ((4, 8, 0), "W4A8"),
        ((4, 8, 32), "W4A8 in blocks"),
        ((8, 8, 32), "W8A8 in blocks"),
        ((4, 16, 0), "W4A16"),
    ],
)
def test_a_kernel_whose_products_differ_is_refused(
    wrong: tuple[int, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amx, "_ask_for_tiles", lambda: None)
    with torch.device("meta"):
        amx.try_out(Ops(None))
        with pytest.raises(BuildError, match=f"its {said} products differ"):
            amx.try_out(Ops(wrong))


def test_linux_is_asked_for_the_registers() -> None:
    if "amx_tile" in instruction_sets():
        amx.try_out(Ops(None))
        return
    with pytest.raises(BuildError, match="Linux does not give this process the registers of AMX: "):
        amx.try_out(Ops(None))


@needs_avx512
def test_the_emulated_kernel_passes_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "_ask_for_tiles", lambda: None)
    amx.try_out(EMULATED.load(EMULATED.kernels[0]))
