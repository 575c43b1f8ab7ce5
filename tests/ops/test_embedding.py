"""Rows of packed weights: what a vocabulary of 4 or 8 bits looks up."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lezero.core.errors import ConfigError
from lezero.ops.linear import embedding_int, native, pack, reference
from lezero.ops.native import Kernel
from lezero.ops.quantize import Grid, dequantize, quantize
from lezero.profiler import MemorySampler
from tests.ops.test_linear import FLOATS, packed, seeded
from tests.ranks import RankPool

FORMS = [(8, 0, False), (8, 32, True), (4, 64, False), (4, 0, True)]


@pytest.mark.parametrize(("bits", "group", "zero"), FORMS)
def test_embedding_reads_the_rows_of_the_weight(bits: int, group: int, zero: bool) -> None:
    grid = Grid("int4" if bits == 4 else "int8", group or "row", zero)
    codes, scale, at = quantize(seeded(40, 70), grid)
    weight, ids = pack(codes, scale, at, bits=bits), torch.tensor([[3, 39], [0, 17]])
    sizes = {"in_features": 70, "bits": bits, "group": group}
    found = embedding_int(ids, weight, **sizes)  # type: ignore[arg-type]
    torch.testing.assert_close(found, dequantize(codes, scale, at, grid)[ids], rtol=0, atol=0)
    half = embedding_int(ids.int(), weight, dtype=torch.bfloat16, **sizes)  # type: ignore[arg-type]
    assert torch.equal(half, found.bfloat16())
    assert embedding_int(ids[:0], weight, **sizes).shape == (0, 2, 70)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="from -1"):
        embedding_int(ids - 1, weight, **sizes)  # type: ignore[arg-type]
    wrongs = ({"in_features": 129}, {"in_features": 64}, {"bits": 12 - bits}, {"group": "row"})
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="embedding_int: "):
            embedding_int(ids, weight, **{**sizes, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [4, 8])
def test_ids_may_lie_apart(bits: int) -> None:
    weight, table = packed(40, 70, bits, 64, False, torch.float32), torch.arange(40).view(8, 5)
    for ids in (table[:, -1], table[:, -1:], table[::2, 1:4], torch.tensor([7]).expand(6)):
        found, wanted = (
            embedding_int(some, weight, in_features=70, bits=bits, group=64)
            for some in (ids, ids.clone(memory_format=torch.contiguous_format))
        )
        assert torch.equal(found, wanted)


def looked_up(bits: int) -> int:
    """In a process of its own: bytes that looking up 4096 rows of 2048 takes."""
    torch.set_num_threads(1)
    weight, ids = packed(1024, 2048, bits, 64, True, torch.float16), torch.arange(4096) % 1024
    sizes = {"in_features": 2048, "bits": bits, "group": 64}
    embedding_int(ids[:8], weight, **sizes)  # type: ignore[arg-type]
    with MemorySampler() as memory:
        embedding_int(ids, weight, **sizes)  # type: ignore[arg-type]
    return memory.above


@pytest.mark.parametrize("kernel", native.NATIVE.able(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("bits", [4, 8])
def test_embedding_kernels_equal_the_reference(bits: int, kernel: Kernel) -> None:
    ops = native.NATIVE.load(kernel)
    for N, K, group in ((40, 70, 32), (16, 300, 0), (33, 129, 64), (5, 1, 0), (20, 128, 96)):
        for zero, kept, dtype in itertools.product((False, True), FLOATS, FLOATS):
            weight, ids = packed(N, K, bits, group, zero, kept), torch.arange(N - 1, -1, -1)
            found = torch.full((N, K), math.nan, dtype=dtype)
            ops.embedding(ids, *weight, found, bits, group)
            assert torch.equal(found, reference.embedding(ids, weight, K, bits, group, dtype))


@pytest.mark.parametrize("bits", [4, 8])
def test_embedding_reads_no_other_rows(bits: int, ranks: RankPool) -> None:
    (above,) = ranks(1, looked_up, bits)
    assert above < 6 * 4096 * 2048 * 4, above / 2**20
