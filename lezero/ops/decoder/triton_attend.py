"""Attention of one new token a sequence over keys and values in blocks, on an accelerator.

One launch turns queries and keys to their positions (RoPE, after a norm of each head where the
model has one), writes the new key and value into the cache, and attends. A program takes the query
heads of one key-value head of one sequence and a part of its past; of the programs of one head the
last to end joins the parts (Dao et al., "Flash-Decoding", 2023), in their order. Parts are of 64
places, or of as many as make at most 16 parts of the sequence's own past, so that what else is in
the step does not change them.

Letters: B sequences, W blocks of the longest, H query heads, K key-value heads, E numbers of a
head, P = E / 2 pairs, G = H / K query heads of one key-value head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lezero.ops.counts import MOST_COUNTED, counts
from lezero.ops.cuda_source import begins_early
from lezero.ops.triton_units import times

BLOCK = 16
"""Places of a block of the cache."""
_PLACES = 64  # that are looked at together
_PARTS = tl.constexpr(16)  # of a past at most
_LEAST_ROWS = 16  # of a product on the matrix units


@triton.jit
def _turned(first, second, norm, half, cos, sin, eps, P: tl.constexpr, NORM: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Rows of pairs in fp32, turned; cos and sin are (1, P)."""
    if NORM:
        total = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = tl.rsqrt(total / (2 * P) + eps)[:, None]
        first = first * factor * tl.load(norm + half).to(tl.float32)[None, :]
        second = second * factor * tl.load(norm + P + half).to(tl.float32)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    mine, k_norm, c, s, block, at, keys, values, head, H, K, eps,
    E: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The new key, turned, and value of a head, at place `at` of `block`."""
    half, whole, one = tl.arange(0, P), tl.arange(0, E), tl.arange(0, 1)[:, None]
    key = mine + (H + head) * E + half[None, :] + one
    k1, k2 = _turned(
        tl.load(key).to(tl.float32), tl.load(key + P).to(tl.float32),
        k_norm, half, c, s, eps, P, NORM,
    )  # fmt: skip
    own = ((block * BLOCK + at % BLOCK) * K + head) * E
    kind = keys.dtype.element_ty
    tl.store(keys + own + half[None, :] + one, k1.to(kind))
    tl.store(keys + own + P + half[None, :] + one, k2.to(kind))
    tl.store(values + own + whole, tl.load(mine + (H + K + head) * E + whole))


@triton.jit
def _look(  # type: ignore[no-untyped-def]
    first, second, table, keys, values, head, begin, end, start, at, K, scale,
    ROWS: tl.constexpr, E: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    PLACES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of places `begin` … `end`, those from `start` to `at`: Σ exp(score - top) v, the largest
    score (top), and Σ exp(score - top)."""
    half, whole = tl.arange(0, P), tl.arange(0, E)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, E), tl.float32)
    low = tl.maximum(begin, start // PLACES * PLACES)
    for lowest in range(low, tl.minimum(end, at + 1), PLACES):
        place = lowest + tl.arange(0, PLACES)
        seen = (place <= at) & (place >= start)
        block = tl.load(table + place // BLOCK, seen, 0)
        line = ((block * BLOCK + place % BLOCK) * K + head) * E
        near = tl.load(keys + line[None, :] + half[:, None], seen[None, :], 0.0)
        far = tl.load(keys + line[None, :] + (P + half)[:, None], seen[None, :], 0.0)
        score = (times(first, near, WIDE) + times(second, far, WIDE)) * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        p = tl.exp(score - higher[:, None])
        before = tl.exp(top - higher)
        weight = weight * before + tl.sum(p, 1)
        v = tl.load(values + line[:, None] + whole[None, :], seen[:, None], 0.0)
        acc = acc * before[:, None] + times(p.to(first.dtype), v, WIDE)
        top = higher
    return acc, top, weight


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    sums, tops, slot, begin, end, ROWS: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    """`_look` of all places from that of parts `begin` … `end`."""
    row, whole = tl.arange(0, ROWS), tl.arange(0, E)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, E), tl.float32)
    for other in range(begin, end):
        theirs = (slot + other) * ROWS + row
        highest = tl.load(tops + 2 * theirs, cache_modifier=".cg")
        higher = tl.maximum(top, highest)
        before, factor = tl.exp(top - higher), tl.exp(highest - higher)
        found = tl.load(sums + theirs[:, None] * E + whole[None, :], cache_modifier=".cg")
        acc = acc * before[:, None] + found * factor[:, None]
        weight = weight * before
        weight += tl.load(tops + 2 * theirs + 1, cache_modifier=".cg") * factor
        top = higher
    return acc, weight


@triton.jit
def _size(at, PLACES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Places of a part of a past that ends at `at`."""
    size = at * 0 + PLACES
    for _ in tl.static_range(24):
        size = tl.where(at >= _PARTS * size, 2 * size, size)
    return size


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    qkv, q_norm, k_norm, cos, sin, position, table, keys, values, out, sums, tops, counts,
    H, K, stride, place_stride, table_stride, eps, scale, window,
    G: tl.constexpr, ROWS: tl.constexpr, E: tl.constexpr, P: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr,
    PAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    head, b, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    at = tl.load(position + b * place_stride)
    start = tl.maximum(at - window + 1, 0)
    size = _size(at, PLACES)
    begin = part * size
    half, whole, row = tl.arange(0, P), tl.arange(0, E), tl.arange(0, ROWS)
    c = tl.load(cos + at * P + half)[None, :]
    s = tl.load(sin + at * P + half)[None, :]
    kind = out.dtype.element_ty
    mine, table = qkv + b * stride, table + b * table_stride
    mask = (row < G)[:, None]
    queries = mine + ((head * G + row) * E)[:, None] + half[None, :]
    first, second = _turned(
        tl.load(queries, mask, 0.0).to(tl.float32), tl.load(queries + P, mask, 0.0).to(tl.float32),
        q_norm, half, c, s, eps, P, NORM,
    )  # fmt: skip
    if (at >= begin) & (at < begin + size):  # the new key and value are of this chunk
        block = tl.load(table + at // BLOCK)
        _write(
            mine, k_norm, c, s, block, at, keys, values, head, H, K, eps, E, P, NORM, BLOCK
        )  # fmt: skip
    tl.debug_barrier()  # all threads of the program see what they wrote
    acc, top, weight = _look(
        first.to(kind), second.to(kind), table, keys, values, head, begin, begin + size, start, at,
        K, scale, ROWS, E, P, BLOCK, PLACES, WIDE,
    )  # fmt: skip
    n = (head * G + row)[:, None] * E + whole[None, :]
    to = out + (b * H * E + n if PAD == 0 else (n // 16 * PAD + b) * 16 + n % 16)
    if PARTS == 1:
        tl.store(to, (acc / weight[:, None]).to(kind), mask)
    else:
        index = b * K + head
        slot = (index * PARTS + part) * ROWS + row
        tl.store(sums + slot[:, None] * E + whole[None, :], acc)
        tl.store(tops + 2 * slot, top)
        tl.store(tops + 2 * slot + 1, weight)
        tl.debug_barrier()
        if tl.atomic_add(counts + index, 1, sem="acq_rel") == PARTS - 1:
            acc, weight = _join(
                sums, tops, index * PARTS, start // size, at // size + 1, ROWS, E
            )  # fmt: skip
            tl.store(to, (acc / weight[:, None]).to(kind), mask)
            tl.store(counts + index, 0)


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
    pad: int = 0,
) -> Tensor:
    """(B, H E) of qkv (B, (H + 2 K) E), in 16 bits; `keys` and `values`, (places, K, E), get the
    new token's at its `position_B`, int64. pad: the result is (H E / 16, pad, 16), as
    `cuda_few.py` takes tokens, and the launch may begin before those ahead of it end.

    cos_TP and sin_TP: fp32, of all positions. table_BW: int64, blocks of 16 places; its rows and
    positions may lie apart. window: how many places back a token looks, itself among them. norms:
    (E,) weights of RMS norms of queries and keys, with `eps`.
    """
    B, W = table_BW.shape
    _, K, E = keys.shape
    group = heads // K
    rows = max(_LEAST_ROWS, triton.next_power_of_2(group))
    parts = min(_PARTS.value, triton.cdiv(W * BLOCK, _PLACES))
    out = qkv.new_empty((heads * E // 16, pad, 16) if pad else (B, heads * E))
    sums = tops = ended = qkv
    if parts > 1:
        assert B * K <= MOST_COUNTED
        sums = qkv.new_empty(B * K, parts, rows, E, dtype=torch.float32)
        tops = qkv.new_empty(B * K, parts, rows, 2, dtype=torch.float32)
        ended = counts(qkv.device)
    early = pad > 0 and qkv.is_cuda and begins_early(qkv.device)
    launch: Any = _attend[(K, B, parts)]
    with torch.accelerator.device_index(qkv.device.index):
        launch(
            *(qkv, *(norms or (qkv, qkv)), cos_TP, sin_TP, position_B, table_BW),
            *(keys, values, out, sums, tops, ended, heads, K, qkv.stride(0)),
            *(position_B.stride(0), table_BW.stride(0), eps, E**-0.5),
            1 << 30 if window is None else window,
            G=group,
            ROWS=rows,
            E=E,
            P=E // 2,
            NORM=norms is not None,
            BLOCK=BLOCK,
            PLACES=_PLACES,
            PARTS=parts,
            WIDE=qkv.device.type == "cpu",
            PAD=pad,
            EARLY=early,
            num_warps=4,
            **({"launch_pdl": True} if early else {}),
        )
    return out
