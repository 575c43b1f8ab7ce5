"""Decoder layers: every kernel against the reference, and rows that do not depend on each other."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.decoder import (
    BlockCache,
    Decoder,
    Ending,
    LayerWeights,
    Shape,
    Weight,
    block_bytes,
    reference,
)
from lezero.ops.decoder.native import NATIVE
from lezero.ops.linear import pack, pack_bf16
from lezero.ops.linear.layout import Packed
from lezero.ops.quantize import Grid, quantize

FORMS: dict[str, dict[str, Any]] = {
    "bf16": {"bits": 16},
    "W8A16": {"bits": 8},
    "W8A8": {"bits": 8, "x_bits": 8},
    "W4A16": {"bits": 4, "group": 64},
    "W4A8": {"bits": 4, "group": 32, "x_bits": 8},
    "W4A8 in blocks": {"bits": 4, "group": 32, "x_bits": 8, "x_block": 32},
}
CACHES = [(form, 16) for form in FORMS] + [("bf16", 8), ("W8A16", 8)]
"""Forms of weights, and the bits of keys and values."""
PLAIN = Shape(dim=96, heads=6, kv_heads=2, head_dim=32, ffn=160, eps=1e-5)
SHAPES = {
    "grouped": PLAIN,
    "window": Shape(96, 6, 2, 32, 160, 1e-5, 50),
    "ragged": Shape(dim=72, heads=5, kv_heads=5, head_dim=16, ffn=104, eps=1e-6),
    "one key head": Shape(dim=64, heads=16, kv_heads=1, head_dim=48, ffn=64, eps=1e-5),
}
BLOCKS = 96


def weight(N: int, K: int, bias: bool, bits: int, group: int = 0, **inputs: Any) -> Weight:
    w = torch.randn(N, K) / math.sqrt(K)
    b = torch.randn(N) if bias else None
    if bits == 16:
        return Weight(Packed(pack_bf16(w), torch.empty(0), None), b, N, K, 16)
    codes, scale, _ = quantize(w, Grid("int8" if bits == 8 else "int4", group or "row"))
    packed = pack(codes, scale.float(), None, bits=bits)
    return Weight(packed, b, N, K, bits, group, **inputs)


def layers(shape: Shape, form: str, count: int = 2, extras: bool = False) -> list[LayerWeights]:
    D, H, K, E, F = shape.dim, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn
    sizes = ((H + 2 * K) * E, D), (D, H * E), (2 * F, D), (D, F)
    made = []
    for _ in range(count):
        qkv, out, gate_up, down = (weight(*size, extras, **FORMS[form]) for size in sizes)
        norms = [torch.rand(n) + 0.5 for n in (D, D, E, E)]
        heads = (norms[2], norms[3]) if extras else (None, None)
        made.append(LayerWeights(norms[0], qkv, out, norms[1], gate_up, down, *heads))
    return made


def tables(shape: Shape, length: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    E = shape.head_dim
    angle = torch.arange(length)[:, None] * (1 / 10_000 ** (torch.arange(0, E, 2) / E))
    return angle.cos().contiguous(), angle.sin().contiguous()


def poisoned(shape: Shape, bits: int = 16) -> BlockCache:
    """A cache that was used before, by somebody whose numbers were none."""
    cache = BlockCache.empty(2, BLOCKS, shape, bits)
    for part in (cache.keys, cache.values):
        part.fill_(math.nan if bits == 16 else -1)
        assert part.view(torch.bfloat16).isnan().all()  # also the scales behind codes
    return cache


STEPS = (
    [[0, 100, 0], [100, 37, 0], [137, 1, 0]],
    [[0, 1, 100], [1, 1, 37], [2, 5, 1]],
    [[0, 130, 101], [130, 90, 38], [220, 1, 6]],
)


@functools.lru_cache(1)
def case(form: str, bits: int, name: str) -> tuple[list[LayerWeights], Tensor, list[Any]]:
    """Weights, blocks, and of each step its chunks, what goes in and what comes out; the same for
    all kernels."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    weights, cache = layers(shape, form, extras=name == "grouped"), poisoned(shape, bits)
    table, steps = torch.randperm(BLOCKS)[:60].view(3, 20).int(), []
    for chunks in STEPS:
        given = torch.tensor(chunks, dtype=torch.int32)
        x = torch.randn(sum(chunk[1] for chunk in chunks), shape.dim)
        expected = x.clone()
        reference.run(shape, weights, expected, *tables(shape), given, table, cache)
        steps.append((given, x, expected))
    return weights, table, steps


@pytest.mark.parametrize("kernel", NATIVE.able(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("form", "bits"), CACHES)
def test_it_equals_the_reference(form, bits, name, kernel, monkeypatch):
    NATIVE.load(kernel)
    assert NATIVE.available()
    monkeypatch.setattr(NATIVE, "_kernel", kernel)
    shape = SHAPES[name]
    weights, table, steps = case(form, bits, name)
    decoder, angles, cache = Decoder(shape, weights), tables(shape), poisoned(shape, bits)
    for given, x, expected in steps:
        found = x.clone()
        decoder.run(found, *angles, given, table, cache)
        assert found.isfinite().all()
        # Keys, values and weights of attention are bf16; one code of eight bits may fall elsewhere.
        assert (found - expected).norm() / expected.norm() < (0.03 if "A8" in form else 0.01)


@pytest.mark.parametrize("kernel", NATIVE.able(), ids=lambda kernel: kernel.name)
def test_the_eps_of_norms_counts_where_numbers_are_small(kernel, monkeypatch):
    NATIVE.load(kernel)
    assert NATIVE.available()
    monkeypatch.setattr(NATIVE, "_kernel", kernel)
    torch.manual_seed(0)
    weights, angles = layers(PLAIN, "bf16", count=1), tables(PLAIN)
    table, chunks = torch.arange(8)[None].int(), torch.tensor([[0, 40, 0]], dtype=torch.int32)
    x = torch.randn(40, PLAIN.dim) * PLAIN.eps**0.5  # its mean square is as large as eps
    found, expected = x.clone(), x.clone()
    Decoder(PLAIN, weights).run(found, *angles, chunks, table, poisoned(PLAIN))
    reference.run(PLAIN, weights, expected, *angles, chunks, table, poisoned(PLAIN))
    assert (found - expected).norm() / expected.norm() < 0.01


@pytest.mark.parametrize("kernel", NATIVE.able(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("form", ["bf16", "W8A16"])
@pytest.mark.parametrize("name", ["grouped", "one key head"])
def test_gates_far_below_0_let_nothing_through(name, form, kernel, monkeypatch):
    """e^-x of such a gate is beyond what fp32 holds."""
    NATIVE.load(kernel)
    assert NATIVE.available()
    monkeypatch.setattr(NATIVE, "_kernel", kernel)
    torch.manual_seed(0)
    shape, angles = SHAPES[name], tables(SHAPES[name])
    (made,) = layers(shape, form, count=1)
    made = dataclasses.replace(made, norm2=made.norm2 * 300)
    table, chunks = torch.arange(8)[None].int(), torch.tensor([[0, 40, 0]], dtype=torch.int32)
    x = torch.randn(40, shape.dim)
    found, expected = x.clone(), x.clone()
    Decoder(shape, [made]).run(found, *angles, chunks, table, poisoned(shape))
    reference.run(shape, [made], expected, *angles, chunks, table, poisoned(shape))
    assert (found - expected).norm() / expected.norm() < 0.01


@pytest.mark.parametrize("kernel", NATIVE.able(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("name", ["grouped", "window"])
@pytest.mark.parametrize(("form", "bits"), CACHES)
def test_a_row_is_the_same_alone_beside_others_and_in_any_chunk(
    form, bits, name, kernel, monkeypatch
):
    NATIVE.load(kernel)
    assert NATIVE.available()
    monkeypatch.setattr(NATIVE, "_kernel", kernel)
    shape = SHAPES[name]
    torch.manual_seed(0)
    decoder, angles = Decoder(shape, layers(shape, form, extras=True)), tables(shape)
    x, other = torch.randn(150, shape.dim), torch.randn(60, shape.dim)
    table = torch.randperm(BLOCKS)[:40].view(2, 20).int()

    def together(splits: list[int], besides: bool) -> torch.Tensor:
        cache, found = poisoned(shape, bits), []
        for begin, end in itertools.pairwise(itertools.accumulate(splits, initial=0)):
            rows, chunks, blocks = [x[begin:end]], [[0, end - begin, begin]], table[:1]
            if besides and len(found) < 20:
                at = 3 * len(found)
                rows.insert(0, other[at : at + 3])
                chunks = [[0, 3, at], [3, end - begin, begin]]
                blocks = table.flip(0).contiguous()
            stream = torch.cat(rows)
            given = torch.tensor(chunks, dtype=torch.int32)
            decoder.run(stream, *angles, given, blocks, cache)
            found.append(stream[begin - end :])
        return torch.cat(found)

    alone = together([150], besides=False)
    for splits, besides in (([1] * 150, False), ([7] * 20 + [10], True), ([100, 1, 49], True)):
        assert torch.equal(together(splits, besides), alone)


@pytest.mark.parametrize("kernel", NATIVE.able(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("form", ["bf16", "W8A16", "W4A8 in blocks"])
def test_logits_are_those_of_the_last_states(form, kernel, monkeypatch):
    NATIVE.load(kernel)
    assert NATIVE.available()
    monkeypatch.setattr(NATIVE, "_kernel", kernel)
    torch.manual_seed(0)
    ending = Ending(torch.rand(PLAIN.dim) + 0.5, weight(333, PLAIN.dim, True, **FORMS[form]))
    decoder, angles = Decoder(PLAIN, layers(PLAIN, form), ending), tables(PLAIN)
    table = torch.randperm(BLOCKS)[:40].view(2, 20).int()
    chunks = torch.tensor([[0, 40, 0], [40, 3, 0]], dtype=torch.int32)
    x = torch.randn(43, PLAIN.dim)
    decoder.run(states := x.clone(), *angles, chunks, table, poisoned(PLAIN))
    for rows in ([42], [0, 39, 41], range(43), []):
        wanted, _ = reference.logits(PLAIN, ending, states[list(rows)])
        given = torch.tensor(list(rows), dtype=torch.int32)
        found, _ = decoder.logits(x.clone(), *angles, chunks, table, poisoned(PLAIN), given)
        assert found.shape == (len(rows), 333)
        # The norm's sum is taken in another order; one code of eight bits may fall elsewhere.
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=3e-2 if "A8" in form else 1e-4)


@pytest.mark.parametrize("kernel", NATIVE.able(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("vocabulary", [1, 31, 33, 700])
def test_the_best_of_the_logits_is_the_first_of_equals(vocabulary, threads, kernel, monkeypatch):
    NATIVE.load(kernel)
    assert NATIVE.available()
    monkeypatch.setattr(NATIVE, "_kernel", kernel)
    torch.manual_seed(0)
    head = torch.randn(vocabulary, PLAIN.dim).repeat_interleave(2, 0)[:vocabulary]  # twins
    codes, scale, _ = quantize(head, Grid("int8"))
    bias = torch.randn(vocabulary).repeat_interleave(2, 0)[:vocabulary] - 5  # no largest above 0
    made = Weight(Packed(*pack(codes, scale.float(), None, bits=8)), bias, vocabulary, PLAIN.dim, 8)
    decoder, angles = (
        Decoder(PLAIN, layers(PLAIN, "W8A16"), Ending(torch.ones(96), made)),
        tables(PLAIN),
    )
    table, chunks = torch.arange(8)[None].int(), torch.tensor([[0, 40, 0]], dtype=torch.int32)
    x, rows, before = torch.randn(40, PLAIN.dim), torch.arange(40).int(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for bad in (None, torch.nan, torch.inf):
            if bad is not None:
                bias[vocabulary // 2] = bad
            given = (x.clone(), *angles, chunks, table, poisoned(PLAIN), rows)
            found, best = decoder.logits(*given, best=True)
            wanted = found.argmax(1) if bad is None else torch.full((40,), -1)
            assert torch.equal(best, wanted)
    finally:
        torch.set_num_threads(before)


def test_threads_do_not_change_a_bit():
    torch.manual_seed(0)
    weights, angles, results = layers(PLAIN, "W8A16"), tables(PLAIN), []
    x = torch.randn(90, PLAIN.dim)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            stream, table = x.clone(), torch.arange(8)[None].int()
            chunks = torch.tensor([[0, 90, 0]], dtype=torch.int32)
            Decoder(PLAIN, weights).run(stream, *angles, chunks, table, poisoned(PLAIN))
            results.append(stream)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found, results[0]) for found in results)


@pytest.mark.parametrize("kernel", NATIVE.able(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("bits", [16, 8])
def test_ranges_of_keys_are_joined_to_the_same_bits_by_any_workers(
    bits, window, kernel, monkeypatch
):
    NATIVE.load(kernel)
    assert NATIVE.available()
    monkeypatch.setattr(NATIVE, "_kernel", kernel)
    shape = Shape(96, 9, 3, 32, 64, 1e-5, window)
    torch.manual_seed(0)
    weights, angles = layers(shape, "W8A16"), tables(shape, 600)
    decoder, x = Decoder(shape, weights), torch.randn(530, shape.dim)
    table = torch.randperm(BLOCKS)[:34][None].int()

    def together(splits: list[int], reference_too: bool = False) -> torch.Tensor:
        mine, theirs, found = poisoned(shape, bits), poisoned(shape, bits), []
        for begin, end in itertools.pairwise(itertools.accumulate(splits, initial=0)):
            given = torch.tensor([[0, end - begin, begin]], dtype=torch.int32)
            decoder.run(stream := x[begin:end].clone(), *angles, given, table, mine)
            if reference_too:
                expected = x[begin:end].clone()
                reference.run(shape, weights, expected, *angles, given, table, theirs)
                assert (stream - expected).norm() / expected.norm() < 0.01
            found.append(stream)
        return torch.cat(found)

    before, whole = torch.get_num_threads(), together([256, 256, 18], reference_too=True)
    try:
        for threads in (1, 2, 4):  # even where all take as many tiles, and uneven
            torch.set_num_threads(threads)
            for splits in ([240, 1, 14, 1, 1, 253, 1, 1, 1, 1, 16], [250, 255, 3, 9, 13]):
                assert torch.equal(together(splits), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("bits", [16, 8])
def test_nan_stays_in_its_sequence(bits, bad):
    torch.manual_seed(0)
    decoder, angles = Decoder(PLAIN, layers(PLAIN, "W8A16")), tables(PLAIN)
    cache, table = poisoned(PLAIN, bits), torch.arange(8).view(2, 4).int()
    chunks = torch.tensor([[0, 20, 0], [20, 20, 0]], dtype=torch.int32)
    x = torch.randn(40, PLAIN.dim)
    clean = x.clone()
    decoder.run(clean, *angles, chunks, table, poisoned(PLAIN, bits))
    x[25] = bad
    decoder.run(x, *angles, chunks, table, cache)
    assert torch.equal(x[:20], clean[:20])
    assert x[25:].isnan().all()


@pytest.mark.parametrize("kernel", NATIVE.able(), ids=lambda kernel: kernel.name)
def test_the_codes_of_keys_and_values_are_those_of_the_reference(kernel, monkeypatch):
    NATIVE.load(kernel)
    assert NATIVE.available()
    monkeypatch.setattr(NATIVE, "_kernel", kernel)
    torch.manual_seed(0)
    weights, angles = layers(PLAIN, "W8A16", count=1), tables(PLAIN)
    mine, theirs = poisoned(PLAIN, 8), poisoned(PLAIN, 8)
    table, chunks = torch.tensor([[7, 3]]).int(), torch.tensor([[0, 23, 0]]).int()
    x = torch.randn(23, PLAIN.dim)
    x[5] = 0  # keys and values of zeros: their scale is 0
    Decoder(PLAIN, weights).run(found := x.clone(), *angles, chunks, table, mine)
    reference.run(PLAIN, weights, x, *angles, chunks, table, theirs)
    assert found.isfinite().all()
    slots = torch.arange(23)
    blocks = table[0, slots // 16].long()
    for ours, other in zip(
        *(reference.read(c, 0, blocks, slots % 16) for c in (mine, theirs)), strict=True
    ):
        step = other.abs().amax(-1, keepdim=True) / 127
        assert ((ours - other).abs() <= 1.02 * step).all()  # a sum may round to the next code
        assert (ours != other).float().mean() < 0.01
        assert not ours[5].any()
    assert mine.keys[:, 0].eq(-1).all()  # no other block was written


def test_keys_and_values_in_int8_answer_nearly_as_those_in_bf16():
    torch.manual_seed(0)
    shape = SHAPES["one key head"]
    weights, angles, x = layers(shape, "W8A16"), tables(shape), torch.randn(200, shape.dim)
    table, chunks = torch.arange(13)[None].int(), torch.tensor([[0, 200, 0]]).int()
    found = []
    for bits in (16, 8):
        stream = x.clone()
        Decoder(shape, weights).run(stream, *angles, chunks, table, poisoned(shape, bits))
        found.append(stream - x)
    assert (found[1] - found[0]).norm() / found[0].norm() < 0.01


def test_int8_takes_about_half_of_the_memory():
    wide, narrow = (BlockCache.empty(2, 8, PLAIN, bits) for bits in (16, 8))
    assert narrow.keys.nbytes / wide.keys.nbytes == (32 + 2) / (2 * 32)
    assert narrow.keys.nbytes == 2 * 8 * PLAIN.kv_heads * block_bytes(PLAIN.head_dim, 8)


def test_a_matrix_of_another_shape_is_named():
    made = layers(PLAIN, "bf16")
    wrong = Shape(96, 6, 2, 32, 128, 1e-5)
    with pytest.raises(ConfigError, match="layer 0, gate_up: 320 × 96, expected 256 × 96"):
        Decoder(wrong, made)


def test_heads_that_kernels_cannot_take_are_refused():
    with pytest.raises(ConfigError, match="heads of width 20"):
        Decoder(Shape(dim=40, heads=2, kv_heads=1, head_dim=20, ffn=32, eps=1e-5), [])
