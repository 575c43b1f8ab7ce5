"""What `cuda_few.py` decides on the host: forms, cuts, and how tokens lie."""

from __future__ import annotations

import itertools

import pytest
import torch

from lezero.ops.linear import Packed, cuda_few

LEAST_SHARED = 99 << 10  # bytes of a block, of the devices from capability 8.0 on


@pytest.mark.parametrize("M", [1, 2, 8, 9, 16])
def test_tokens_in_slices(M: int) -> None:
    x = torch.randn(M, 96).bfloat16()
    found = cuda_few.sliced(x)
    assert found.shape == (6, cuda_few.padded(M), 16)
    assert torch.equal(found[:, :M].transpose(0, 1).flatten(1), x)


def test_one_token_is_copied_where_it_lies_between_words() -> None:
    flat = torch.randn(200).bfloat16()
    for first in range(9):
        found = cuda_few.sliced(flat[first : first + 96].view(1, 96))
        assert found.data_ptr() % 16 == 0
        assert torch.equal(found.flatten(), flat[first : first + 96])


def test_forms() -> None:
    assert cuda_few.suits(torch.bfloat16, 4096, 4, 64)
    assert cuda_few.suits(torch.float16, 4096, 16, 0)
    assert not cuda_few.suits(torch.float32, 4096, 4, 64)
    assert not cuda_few.suits(torch.bfloat16, 4080, 4, 64)
    assert not cuda_few.suits(torch.bfloat16, 4096, 8, 32)
    assert not cuda_few.suits(torch.bfloat16, 1 << 16, 4, 64)


def test_parts_of_a_weight_may_begin_between_words() -> None:
    codes, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 9).bfloat16()
    assert cuda_few.aligned(Packed(codes, scales, None))
    assert cuda_few.aligned(Packed(codes[1:], scales, scales))
    for held in (scales[1:], scales[:, 1:]):
        assert not cuda_few.aligned(Packed(codes, held, None))
        assert not cuda_few.aligned(Packed(codes, scales, held))
    assert not cuda_few.aligned(Packed(codes[:, 1:], scales, None))


def test_shared_memory_is_enough_everywhere() -> None:
    inputs = (32, 2048, 4096, 14336, 16384, 16416, 1 << 15)
    kinds = itertools.product((4, 8), (0, 32, 64, 512), inputs, (1, 8, 16), (10, 10_000), (0, 1))
    for bits, group, K, pad, tiles, early in kinds:
        step = cuda_few.step_of(bits, group)
        steps = -(-K // step)
        cut = cuda_few.best_cut(bits, K, tiles, steps, pad, bool(early), 132)
        held = cuda_few.shared_bytes(bits, group, K, pad, cut.staged, zero=True)
        sums = 2 * cut.warps * max(8, pad) * 17 * 4 + 64
        assert held + sums <= LEAST_SHARED, (bits, group, K, pad, tiles, early)
        assert 32 * cut.warps * cut.blocks <= 1024
