"""Blocks that are kept are the numbers that the `gguf` package makes of them."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lezero.models.gguf_blocks import read_blocks, shares
from lezero.models.gguf_header import TensorInfo
from lezero.ops.quantize import dequantize

gguf = pytest.importorskip("gguf")
KINDS = gguf.GGMLQuantizationType
SHAPES = [(1, 32), (5, 96), (33, 64)]


def numbers(rows: Any, kind: int) -> torch.Tensor:
    """As kernels read them: scales and zero points in fp16."""
    (codes, scale, zero), grid = read_blocks(rows, kind)
    zeros = None if zero is None else zero.half()
    return dequantize(codes, scale.half(), zeros, grid)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [KINDS.Q4_0, KINDS.Q4_1, KINDS.Q8_0], ids=lambda k: k.name)
def test_blocks_are_the_numbers_of_the_file(kind: Any, shape: tuple[int, int]) -> None:
    drawn = np.random.default_rng(0)
    weight = drawn.normal(size=shape).astype(np.float32)
    weight[0, :8] += 4  # zero points that are no whole numbers
    rows = gguf.quants.quantize(weight, kind)
    wanted = torch.from_numpy(gguf.quants.dequantize(rows, kind))
    found = numbers(rows, kind)
    if kind == KINDS.Q4_1:
        least = torch.from_numpy(weight).unflatten(1, (-1, 32)).amin(-1)
        most_NK = (least.abs() / 2048 + 1e-6).repeat_interleave(32, 1)
        assert bool(((found - wanted).abs() <= most_NK).all())
        in_bf16 = wanted.bfloat16().float()
        assert float((found - wanted).norm()) < 0.5 * float((in_bf16 - wanted).norm())
    else:
        assert torch.equal(found, wanted)


FP16 = st.floats(-60000, 60000, width=16)


@settings(max_examples=300, deadline=None)
@given(d=FP16, m=FP16, codes=st.binary(min_size=16, max_size=16))
def test_any_block_of_q4_1_stays_within_its_bound(d: float, m: float, codes: bytes) -> None:
    """Also where d is 0 or far below m, of which no zero point of fp16 tells."""
    rows = np.frombuffer(np.array([d, m], np.float16).tobytes() + codes, np.uint8)[None]
    wanted = torch.from_numpy(gguf.quants.dequantize(rows, KINDS.Q4_1))
    most = abs(m) / 2048 + abs(d) * 2.0**-25  # the last: zero points below the normal numbers
    error = (numbers(rows, KINDS.Q4_1) - wanted).abs().max()
    assert float(error) <= most * (1 + 1e-3) + 1e-6 * float(wanted.abs().max())


def test_constant_blocks_are_exact() -> None:
    for d, m in ((0.0, 0.0), (0.0, -2.5), (0.0, 0.375)):
        rows = np.frombuffer(np.array([d, m], np.float16).tobytes() + bytes(range(16)), np.uint8)
        assert numbers(rows[None], KINDS.Q4_1).tolist() == [[m] * 32]


def test_the_least_code_of_eight_bits_is_kept() -> None:
    rows = np.frombuffer(np.float16(0.5).tobytes() + bytes([128] * 32), np.uint8)[None]
    assert numbers(rows, KINDS.Q8_0).tolist() == [[-64.0] * 32]


def test_shares_count_the_layers_weights() -> None:
    kinds = {"blk.0.a": KINDS.Q4_1, "blk.0.b": KINDS.Q6_K, "output": KINDS.Q8_0}
    infos = [TensorInfo(name, (4, 256), int(kind), 0) for name, kind in kinds.items()]
    assert shares([*infos, TensorInfo("blk.0.norm", (4,), 0, 0)]) == {4: 0.5, 8: 0.0}
    assert shares([]) == {4: 0.0, 8: 0.0}
