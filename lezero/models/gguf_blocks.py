"""Blocks of a GGUF file as codes, scales and zero points, so that nothing is rounded again.

Blocks of 32 inputs (`ggml-common.h` of ggml: block_q4_0, block_q4_1, block_q8_0), d and m in fp16:

    Q4_0    d, 16 bytes of codes       w = (q - 8) d
    Q4_1    d, m, 16 bytes of codes    w = q d + m
    Q8_0    d, 32 codes of int8        w = q d

The low halves of the bytes are the first 16 inputs, the high halves the others.

[Note: zero points of Q4_1] Kernels read w = (q - z) s, so s = d and z = -m / d, which fp16 rounds:
no weight moves by more than |m| / 2048. A block that has no such z (d is 0, or too small beside m)
is as good as constant: s = m, z = -1, and all codes 0.

Letters: N output features, K input features, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from lezero.models.gguf_header import TensorInfo
from lezero.ops.quantize import Grid, Quantized

BLOCK = 32
BITS = {2: 4, 3: 4, 8: 8}
"""ggml's numbers of the types that are kept, and the bits of their codes."""
_Q4_0, _Q4_1, _Q8_0 = BITS
_LARGEST = float(np.finfo(np.float16).max)


class Blocks(NamedTuple):
    """A matrix as it lies in a file: `made`, codes (N, K), scales and zero points (N, G), on
    `grid`."""

    made: Quantized
    grid: Grid


def read_blocks(rows: Any, kind: int) -> Blocks:
    """The blocks in (N, bytes of a row) of uint8. kind: a key of `BITS`."""
    N = len(rows)
    block = rows.reshape(N, -1, {_Q4_0: 18, _Q4_1: 20, _Q8_0: 34}[kind])
    d = _half(block, 0)
    if kind == _Q8_0:
        codes = block[:, :, 2:].copy().view(np.int8)
        grid = Grid("int8", BLOCK, scale_dtype="fp16")
        return Blocks(Quantized(_flat(codes), torch.from_numpy(d), None), grid)
    halves = block[:, :, -16:]
    codes = np.concatenate([halves & 15, halves >> 4], -1)
    zero = None
    if kind == _Q4_1:
        m = _half(block, 2)
        with np.errstate(divide="ignore", invalid="ignore"):
            zero = -m / d
        constant = (d == 0) | (np.abs(zero) > _LARGEST)
        d, zero = np.where(constant, m, d), np.where(constant, np.float32(-1), zero)
        codes[constant] = 0
    grid = Grid("int4", BLOCK, zero is not None, "fp16")
    zeros = None if zero is None else torch.from_numpy(zero)
    return Blocks(Quantized(_flat(codes), torch.from_numpy(d), zeros), grid)


def shares(tensors: Iterable[TensorInfo]) -> dict[int, float]:
    """Of the layers' weights in a file, how many lie in blocks that are kept: bits → 0 to 1."""
    found, whole = dict.fromkeys((4, 8), 0), 0
    for info in tensors:
        if info.name.startswith("blk.") and len(info.shape) == 2:
            size = info.shape[0] * info.shape[1]
            whole += size
            if info.kind in BITS:
                found[BITS[info.kind]] += size
    return {bits: count / max(whole, 1) for bits, count in found.items()}


def bytes_read(tensors: Iterable[TensorInfo], matrix: int, keep: bool) -> int:
    """What the tensors of a file take once they are read, and what lies beside them meanwhile: a
    number of a matrix so many bytes, of others four. keep: whether blocks stay."""
    found, largest = 0.0, 0
    for info in tensors:
        largest = max(largest, math.prod(info.shape))
        kept = keep and info.kind in BITS and len(info.shape) == 2
        each: float = matrix if len(info.shape) == 2 else 4
        if kept:  # d in fp16, and of Q4_1 a zero point
            each = BITS[info.kind] / 8 + (4 if info.kind == _Q4_1 else 2) / BLOCK
        found += math.prod(info.shape) * each
    return int(found) + largest * (3 if keep else 4)  # codes that are taken apart, or fp32


def _half(block: Any, at: int) -> Any:
    """The fp16 number at a byte of each block: (N, G) in fp32."""
    return block[:, :, at : at + 2].copy().view(np.float16)[:, :, 0].astype(np.float32)


def _flat(codes: Any) -> torch.Tensor:
    return torch.from_numpy(codes.reshape(len(codes), -1))
