"""Attention of one new token a sequence over keys and values in blocks, on NVIDIA (`attend.cu`).

One launch turns queries and keys to their positions (RoPE, after a norm of each head where the
model has one), writes the new key and value into the cache, and attends. A block of threads takes
the query heads of one key-value head of one sequence and a part of its past, which it asks for
before the launch ahead of it has ended; of the blocks of one head the last to end joins the parts
(Dao et al., "Flash-Decoding", 2023), in their order. Parts are of 256 places, or of as many as make
at most 16 parts of the sequence's own past, so that what else is in the step does not change them.

Letters: B sequences, W blocks of the longest, H query heads, K key-value heads, E numbers of a
head, P = E / 2 pairs, G = H / K query heads of one key-value head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lezero.ops.counts import MOST_COUNTED, counts
from lezero.ops.cuda_source import kernel

BLOCK = 16
"""Places of a block of the cache."""
_SOURCE = Path(__file__).with_name("attend.cu")
_WARPS, _PLACES, _PARTS, _BYTES = 8, 256, 16, 16
_MOST_GROUP = 16


def suits(dtype: torch.dtype, sequences: int, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether there is a kernel: heads of 64 or 128 numbers in 16 bits, at most 16 query heads of
    one key-value head."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128)
        and heads // kv_heads <= _MOST_GROUP
        and sequences * kv_heads <= MOST_COUNTED
    )


def aligned(norms: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether weights of norms begin where the kernel may read 16 bytes at once."""
    return not any(weight.data_ptr() % _BYTES for pair in norms for weight in pair)


def attend(
    qkv: Tensor,
    cos_TP: Tensor,
    sin_TP: Tensor,
    position_B: Tensor,
    table_BW: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    window: int | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    pad: int = 1,
) -> Tensor:
    """(H E / 16, pad, 16), as `cuda_few.py` takes tokens, of qkv (B, (H + 2 K) E); `keys` and
    `values`, (places, K, E), get the new token's at its `position_B`, int64.

    The launch may begin before those ahead of it end, so none of them may write positions, tables
    or the past. cos_TP and sin_TP: fp32, of all positions. table_BW: int64, blocks of 16 places;
    its rows and positions may lie apart. window: how many places back a token looks, itself among
    them. norms: (E,) weights of RMS norms of queries and keys, with `eps`.
    """
    B, W = table_BW.shape
    _, K, E = keys.shape
    assert suits(qkv.dtype, B, heads, K, E)
    read = [qkv, keys, values, *(norms or ())]
    assert all(one.is_contiguous() and one.dtype == qkv.dtype for one in read)
    assert not any(one.data_ptr() % _BYTES for one in read)
    assert position_B.dtype == table_BW.dtype == torch.int64
    assert cos_TP.dtype == sin_TP.dtype == torch.float32
    group, place = heads // K, qkv.device
    out = qkv.new_empty(heads * E // 16, pad, 16)
    parts = min(_PARTS, -(-W * BLOCK // _PLACES))
    sums = ended = None
    if parts > 1:
        sums = qkv.new_empty(B * K, parts, group, E + 2, dtype=torch.float32)
        ended = counts(place)
    given = {"HALF": int(qkv.dtype == torch.float16), "E": E, "G": group}
    given |= {"NORM": int(norms is not None), "PAD": pad}
    numbers: list[Any] = [
        ctypes.c_int(heads),
        ctypes.c_int(K),
        ctypes.c_longlong(position_B.stride(0)),
    ]
    numbers += [ctypes.c_longlong(table_BW.stride(0)), ctypes.c_int(parts)]
    numbers += [ctypes.c_float(eps), ctypes.c_float(E**-0.5)]
    kernel(_SOURCE, "attend", place, given).launch(
        place,
        (K, B, parts),
        32 * _WARPS,
        [
            *(qkv, *(norms or (None, None)), cos_TP, sin_TP, position_B, table_BW),
            *(keys, values, out, sums, ended, *numbers),
            ctypes.c_int(1 << 30 if window is None else window),
        ],
        early=True,
        shared=4 * _WARPS * group * (E + 10),
    )
    return out
