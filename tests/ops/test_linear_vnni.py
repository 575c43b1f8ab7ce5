"""The kernels with AVX-VNNI: their logic over emulated instructions (`avx_vnni.h`), wherever there
is AVX2. Where a processor has the instructions, the suites of each op hold the true kernels too."""

from __future__ import annotations

import dataclasses
import random
import shutil

import pytest
import torch

from lezero.core.facts import instruction_sets
from lezero.ops.decoder.native import NATIVE as DECODER
from lezero.ops.linear import native
from lezero.ops.native import Kernel, Native
from tests.ops import test_decoder, test_linear
from tests.ops.conformance import OpConformance, fresh
from tests.ops.test_linear import FLOATS, packed, seeded


def emulated(kernel: Kernel) -> Kernel:
    flags = [flag for flag in kernel.flags if flag != "-mavxvnni"]
    return dataclasses.replace(
        kernel,
        name="avx_vnni_emulated",
        needs=kernel.needs - {"avx_vnni"},
        flags=(*flags, "-DLEZERO_VNNI_EMULATED"),
    )


def named(kernels: Native, name: str) -> Kernel:
    return next(kernel for kernel in kernels.kernels if kernel.name == name)


LINEAR = Native(
    "linear",
    [emulated(named(native.NATIVE, "avx_vnni"))],
    registration=native.NATIVE.registration,
    otherwise="nothing: it is for tests",
)
LAYERS = emulated(named(DECODER, "avx_vnni"))
pytestmark = pytest.mark.skipif(
    not LAYERS.needs <= set(instruction_sets()) or not shutil.which("cc"),
    reason="no AVX2 here, or no compiler",
)


@pytest.mark.parametrize(
    "suite", [test_linear.TestInt(), test_linear.TestBf16()], ids=["int", "bf16"]
)
def test_the_cases_of_every_kernel(suite: OpConformance) -> None:
    ops = LINEAR.load(LINEAR.kernels[0])
    for name, args in suite.cases():
        suite.held(name, suite.kernel(ops, *fresh(args)), suite.expected(*fresh(args)))


def test_layers_of_all_shapes_are_those_of_avx2_bit_for_bit() -> None:
    """Whole numbers are the same however they are summed."""
    ops, plain = LINEAR.load(LINEAR.kernels[0]), native.NATIVE.load(named(native.NATIVE, "avx2"))
    draw = random.Random(0)
    for _ in range(100):
        M, N, K = draw.randint(1, 40), draw.randint(1, 300), draw.randint(1, 900)
        bits, group = draw.choice([4, 8]), draw.choice([0, 32, 64, 96, 128])
        form, dtype = draw.choice([(8, 0), (8, 32), (16, 0)]), draw.choice(FLOATS)
        x, weight = seeded(M, K).to(dtype), packed(N, K, bits, group, draw.random() < 0.3, dtype)
        given = (x, *weight, seeded(N), None, N, bits, group, *form)
        same = torch.equal(ops.linear_int(*given), plain.linear_int(*given))
        assert same, (M, K, dtype, given[7:])


@pytest.mark.parametrize("name", test_decoder.SHAPES)
@pytest.mark.parametrize(("form", "bits"), test_decoder.CACHES)
def test_layers_of_a_decoder(
    form: str, bits: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_decoder.test_it_equals_the_reference(form, bits, name, LAYERS, monkeypatch)
