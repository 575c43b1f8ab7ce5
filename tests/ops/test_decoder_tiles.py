"""Decoder layers by AMX: attention by tiles, and layers of few bits multiplied as bf16.

Over emulated instructions (`amx_tile.h`) where there is AVX-512, and over the processor's own where
it has them.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lezero.core.facts import instruction_sets
from lezero.ops.decoder import Decoder, Ending, LayerWeights, Shape, Weight, reference
from lezero.ops.decoder.native import NATIVE
from lezero.ops.linear import amx, pack
from lezero.ops.native import Kernel
from tests.ops import test_decoder
from tests.ops.test_decoder import BLOCKS, STEPS, poisoned, tables

AMX = next(kernel for kernel in NATIVE.kernels if kernel.name == "amx")
EMULATED = dataclasses.replace(
    AMX,
    name="amx_emulated",
    needs=AMX.needs - amx.INSTRUCTIONS,
    flags=(*AMX.flags, "-DLEZERO_AMX_EMULATED"),
    trial=None,
)
KERNELS = [kernel for kernel in (AMX, EMULATED) if kernel.needs <= set(instruction_sets())]
pytestmark = pytest.mark.skipif(
    not KERNELS or not shutil.which("cc"),
    reason="no AVX-512 here, which the emulation needs, or no compiler",
)
SHAPES = {
    "64": Shape(dim=96, heads=6, kv_heads=2, head_dim=64, ffn=160, eps=1e-5),
    "96, window": Shape(dim=72, heads=4, kv_heads=4, head_dim=96, ffn=104, eps=1e-5, window=50),
    "64, gated": Shape(dim=96, heads=6, kv_heads=2, head_dim=64, ffn=192, eps=1e-5),
    "32, 24 rows a key head": Shape(dim=64, heads=24, kv_heads=1, head_dim=32, ffn=64, eps=1e-5),
}
FORMS = {"int8": (8, 0), "int4": (4, 32), "int4 with zero points": (4, 64)}


@pytest.fixture(params=KERNELS, ids=lambda kernel: kernel.name)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    NATIVE.load(request.param)
    assert NATIVE.available()
    monkeypatch.setattr(NATIVE, "_kernel", request.param)
    return request.param


def rounded_layers(shape: Shape, form: str) -> list[LayerWeights]:
    bits, group = FORMS[form]

    def weight(N: int, K: int) -> Weight:
        groups, zero = -(-K // group) if group else 1, None
        if bits == 8:
            codes = torch.randint(-128, 128, (N, K), dtype=torch.int8)
        else:
            codes = torch.randint(0, 16, (N, K), dtype=torch.uint8)
        if "zero" in form:
            zero = torch.rand(N, groups) * 15
        scale = (torch.rand(N, groups) + 0.5) / (K**0.5 * 2.0 ** (bits - 1))
        packed = pack(codes, scale, zero, bits=bits)
        return Weight(packed, torch.randn(N), N, K, bits, group, x_bits=8, x_block=0)

    D, H, K, E, F = shape.dim, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn
    made = []
    for _ in range(2):
        parts = [weight(*s) for s in (((H + 2 * K) * E, D), (D, H * E), (2 * F, D), (D, F))]
        qkv, out, gate_up, down = parts
        made.append(LayerWeights(torch.rand(D) + 0.5, qkv, out, torch.rand(D), gate_up, down))
    return made


def steps(shape: Shape) -> Iterator[tuple[Tensor, Tensor]]:
    for chunks in STEPS:
        yield (
            torch.tensor(chunks, dtype=torch.int32),
            torch.randn(sum(chunk[1] for chunk in chunks), shape.dim),
        )


def held(shape: Shape, weights: list[LayerWeights], rounded: bool, within: float) -> None:
    decoder, angles = Decoder(shape, weights), tables(shape)
    ours, theirs = poisoned(shape), poisoned(shape)
    table = torch.randperm(BLOCKS)[:60].view(3, 20).int()
    for given, x in steps(shape):
        found, expected = x.clone(), x.clone()
        decoder.run(found, *angles, given, table, ours, rounded)
        reference.run(shape, weights, expected, *angles, given, table, theirs, rounded)
        assert found.isfinite().all()
        assert (found - expected).norm() / expected.norm() < within


@pytest.mark.parametrize("name", SHAPES)
def test_attention_by_tiles_equals_the_reference(name, kernel):
    torch.manual_seed(0)
    shape = SHAPES[name]
    held(shape, test_decoder.layers(shape, "bf16", extras=True), rounded=False, within=0.01)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SHAPES)
def test_layers_of_few_bits_multiplied_as_bf16_equal_the_reference(name, form, kernel):
    torch.manual_seed(0)
    held(SHAPES[name], rounded_layers(SHAPES[name], form), rounded=True, within=0.01)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_a_row_is_the_same_in_any_chunk(name, rounded, kernel):
    torch.manual_seed(0)
    shape = SHAPES[name]
    form = "int4 with zero points" if rounded else "int8"
    decoder, angles = Decoder(shape, rounded_layers(shape, form)), tables(shape)
    x, table = torch.randn(150, shape.dim), torch.randperm(BLOCKS)[:20].view(1, 20).int()

    def run(*counts: int) -> Tensor:
        cache, found, begin = poisoned(shape), x.clone(), 0
        for part in found.split(list(counts)):
            chunks = torch.tensor([[0, len(part), begin]], dtype=torch.int32)
            decoder.run(part, *angles, chunks, table, cache, rounded)
            begin += len(part)
        return found

    whole = run(150)
    for counts in ((1, 100, 49), (70, 1, 1, 78), (16, 17, 15, 102)):
        assert torch.equal(run(*counts), whole)


@pytest.mark.parametrize("form", ["bf16", "int4 with zero points", "bf16 and int8"])
def test_workers_that_take_their_own_tokens_find_the_same(form, kernel):
    torch.manual_seed(0)
    shape, rounded = SHAPES["64, gated"], form in FORMS
    made = rounded_layers(shape, form) if rounded else test_decoder.layers(shape, "bf16")
    if form == "bf16 and int8":  # rows of two types, which must not lie across each other
        eight = [layer.out for layer in rounded_layers(shape, "int8")]
        made = [dataclasses.replace(y, out=out) for y, out in zip(made, eight, strict=True)]
    ending = Ending(torch.rand(shape.dim), test_decoder.weight(333, shape.dim, False, 8))
    decoder, angles = Decoder(shape, made, ending), tables(shape, 500)
    x, table = torch.randn(500, shape.dim), torch.randperm(BLOCKS)[:32].view(1, 32).int()

    def run(*counts: int) -> tuple[Tensor, Tensor]:
        cache, found, begin = poisoned(shape), x.clone(), 0
        for part in found.split(list(counts)):
            chunks = torch.tensor([[0, len(part), begin]], dtype=torch.int32)
            given = (*angles, chunks, table, cache)
            rows = torch.tensor([0, len(part) // 2, len(part) - 1], dtype=torch.int32)
            logits, _ = decoder.logits(part.clone(), *given, rows, rounded=rounded)
            decoder.run(part, *given, rounded)
            begin += len(part)
        return found, logits

    before, wanted = torch.get_num_threads(), run(5, 99, 99, 99, 99, 99)[0]
    try:
        for threads in (1, 2, 3):  # 160 and more tokens of each: by itself; blocks lie across
            torch.set_num_threads(threads)
            found, logits = run(5, 495)
            assert torch.equal(found, wanted)
            last = torch.tensor([0, 247, 494])
            expected, _ = reference.logits(shape, ending, found[5:][last])
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(before)


def test_only_amx_rounds_and_only_where_there_is_something_to_round(monkeypatch):
    shape = SHAPES["64"]
    few = Decoder(shape, rounded_layers(shape, "int4"))
    assert not Decoder(shape, test_decoder.layers(shape, "bf16")).rounds
    for name in ("amx", "avx512_vnni"):
        monkeypatch.setattr(NATIVE, "kernel_name", lambda name=name: name)
        assert few.rounds == (name == "amx" and NATIVE.available())
        assert few.most_tokens == (512 if few.rounds else 256)
