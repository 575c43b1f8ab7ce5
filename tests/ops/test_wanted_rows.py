"""Behind the last layer's keys only wanted rows go on: what they give and leave does not differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from lezero.ops.decoder import BlockCache, Decoder, Ending, LayerWeights
from lezero.ops.decoder.native import NATIVE
from lezero.ops.native import Kernel
from tests.ops import test_decoder, test_decoder_tiles
from tests.ops.test_decoder import PLAIN, SHAPES, layers, poisoned, tables, weight
from tests.ops.test_decoder_tiles import rounded_layers

ABLE = {kernel.name: kernel for kernel in (*NATIVE.able(), *test_decoder_tiles.KERNELS)}
STEPS = (
    [[0, 100, 0], [100, 37, 0], [137, 1, 0]],
    [[0, 1, 100], [1, 1, 37], [2, 5, 1]],
    [[0, 6, 101]],
)
LONG = ([[0, 340, 0]], [[0, 3, 340]])
"""For three threads that take 100 tokens and more each, with AMX."""


@pytest.fixture(params=ABLE.values(), ids=lambda kernel: kernel.name)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    NATIVE.load(request.param)
    assert NATIVE.available()
    monkeypatch.setattr(NATIVE, "_kernel", request.param)
    return request.param


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def subsets(count: int) -> list[list[int]]:
    """The last row, none, one that is first, two beside each other, and some far apart."""
    return [[count - 1], [], [0], [count // 3, count // 3 + 1], sorted({0, count // 2, count - 1})]


def held(
    decoder: Decoder, steps: Sequence[list[list[int]]], bits: int, rounded: bool, narrow: int
) -> None:
    """Each step asked for all rows, and for the `narrow`th of `subsets`, each with a cache of its
    own that goes from step to step."""
    shape, angles = decoder.shape, tables(decoder.shape, 500)
    table = torch.randperm(test_decoder.BLOCKS)[:75].view(3, 25).int()
    whole, part = poisoned(shape, bits), poisoned(shape, bits)

    def asked(x: Tensor, cache: BlockCache, chunks: Tensor, rows: list[int]) -> Tensor:
        given, some = torch.tensor(rows, dtype=torch.int32), table[: len(chunks)].contiguous()
        place = (*angles, chunks, some, cache)
        logits, best = decoder.logits(x.clone(), *place, given, True, rounded)
        assert torch.equal(best, logits.argmax(1) if rows else torch.empty(0, dtype=torch.int64))
        return logits

    for chunks in map(torch.tensor, steps):
        x = torch.randn(int(chunks[:, 1].sum()), shape.dim)
        rows = subsets(len(x))[narrow]
        expected = asked(x, whole, chunks.int(), list(range(len(x))))
        assert torch.equal(asked(x, part, chunks.int(), rows), expected[rows])
        for name in ("keys", "values"):
            kept = (getattr(cache, name).view(torch.uint8) for cache in (whole, part))
            assert torch.equal(*kept)


@pytest.mark.parametrize("narrow", range(5))
@pytest.mark.parametrize(("form", "bits"), [("bf16", 16), ("W4A8 in blocks", 16), ("W8A16", 8)])
@pytest.mark.parametrize("name", ["grouped", "window"])
def test_logits_are_the_same_whichever_rows_are_wanted(name, form, bits, narrow, threads, kernel):
    torch.manual_seed(0)
    ending = Ending(torch.rand(PLAIN.dim) + 0.5, weight(333, PLAIN.dim, False, 8))
    made: list[LayerWeights] = layers(SHAPES[name], form, extras=name == "grouped")
    held(Decoder(SHAPES[name], made, ending), STEPS, bits, False, narrow)


@pytest.mark.parametrize("narrow", range(5))
@pytest.mark.parametrize("form", ["bf16", "int4 with zero points"])
@pytest.mark.parametrize(
    "kernel", test_decoder_tiles.KERNELS, ids=lambda kernel: kernel.name, indirect=True
)
def test_and_where_workers_take_their_own_tokens(form, narrow, threads, kernel):
    torch.manual_seed(0)
    shape, rounded = test_decoder_tiles.SHAPES["64, gated"], form != "bf16"
    made = rounded_layers(shape, form) if rounded else layers(shape, form)
    ending = Ending(torch.rand(shape.dim), weight(333, shape.dim, False, 8))
    held(Decoder(shape, made, ending), LONG, 16, rounded, narrow)
