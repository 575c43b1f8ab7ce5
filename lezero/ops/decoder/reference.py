"""Decoder layers over a cache of blocks in plain PyTorch: what the kernels are held to.

    x += out(attention(qkv(norm1(x))));  x += down(silu(gate(norm2(x))) · up(norm2(x)))

Norms are RMSNorm; queries and keys are normalised (where there are weights for it) and turned by
their positions, then keys and values are kept in bf16, or in int8 with a scale for each token and
head; a token sees the keys of its sequence up to its own. Weights of 16 bits take inputs rounded to
bf16, and their results are rounded to bf16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lezero.ops.decoder.weights import Ending, LayerWeights, Weight
from lezero.ops.linear import reference as linear

if TYPE_CHECKING:
    from lezero.ops.decoder.op import BlockCache, Shape


def run(
    shape: Shape,
    layers: Sequence[LayerWeights],
    x_TD: Tensor,
    cos: Tensor,
    sin: Tensor,
    chunks: Tensor,
    table: Tensor,
    cache: BlockCache,
    rounded: bool = False,
) -> None:
    """See `Decoder.run`."""
    product = multiply_rounded if rounded else multiply
    for index, layer in enumerate(layers):
        found = product(norm(x_TD, layer.norm1, shape.eps), layer.qkv).float()
        y_THE = attention(shape, layer, index, found, cos, sin, chunks, table, cache)
        x_TD += product(y_THE.flatten(1), layer.out).float()
        found = product(norm(x_TD, layer.norm2, shape.eps), layer.gate_up).float()
        gate, up = found.chunk(2, 1)
        x_TD += product(F.silu(gate) * up, layer.down).float()


def logits(shape: Shape, ending: Ending, x_RD: Tensor, best: bool = False) -> tuple[Tensor, Tensor]:
    """See `Decoder.logits`. Rows are fp32, also where the head has 16 bits."""
    head, rows_RD = ending.head, norm(x_RD, ending.norm, shape.eps)
    if head.bits == 16:
        found = linear.linear_bf16(rows_RD, head.packed.weight, head.bias, head.out_features)
    else:
        found = multiply(rows_RD, head)
    places = found.argmax(1).where(found.isfinite().all(1), -1)
    return found, places if best else places[:0]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim (Zhang and Sennrich, 2019, equation 4)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def multiply(x_TK: Tensor, weight: Weight) -> Tensor:
    """x wᵀ + bias as the layers do it."""
    if weight.bits == 16:
        packed, N = weight.packed.weight, weight.out_features
        return linear.linear_bf16(x_TK.bfloat16(), packed, weight.bias, N)
    sizes = (weight.out_features, weight.bits, weight.group, weight.x_bits, weight.x_block)
    return linear.linear_int(x_TK, weight.packed, weight.bias, None, *sizes)


def multiply_rounded(x_TK: Tensor, weight: Weight) -> Tensor:
    """The same by `linear_rounded`, with x rounded to bf16."""
    if weight.bits == 16:
        return multiply(x_TK, weight)
    sizes = (weight.out_features, weight.bits, weight.group)
    return linear.linear_rounded(x_TK, weight.packed, weight.bias, *sizes)


def attention(
    shape: Shape,
    layer: LayerWeights,
    index: int,
    qkv_TN: Tensor,
    cos: Tensor,
    sin: Tensor,
    chunks: Tensor,
    table: Tensor,
    cache: BlockCache,
) -> Tensor:
    """(T, H, E): what each token gathers; its keys and values go into the cache."""
    H, K, E = shape.heads, shape.kv_heads, shape.head_dim
    out_THE = qkv_TN.new_empty(len(qkv_TN), H, E, dtype=torch.float32)
    for (first, count, position), blocks in zip(chunks.tolist(), table, strict=True):
        rows = slice(first, first + count)
        q, k, v = qkv_TN[rows].unflatten(1, (-1, E)).split((H, K, K), 1)
        at = torch.arange(position, position + count, device="cpu")
        q = _turned(q, layer.q_norm, shape.eps, cos[at, None], sin[at, None])
        k = _turned(k, layer.k_norm, shape.eps, cos[at, None], sin[at, None])
        write(cache, index, blocks[at // 16].long(), at % 16, k, v)
        seen = torch.arange(position + count, device="cpu")
        k, v = read(cache, index, blocks[seen // 16].long(), seen % 16)
        mask = seen <= at[:, None]
        if shape.window:
            mask &= seen > at[:, None] - shape.window
        scaled = q / math.sqrt(E)
        if cache.bits == 16:
            scaled = scaled.bfloat16().float()
        keys, values = (x.repeat_interleave(H // K, 1) for x in (k, v))
        score = torch.einsum("the,she->hts", scaled, keys).masked_fill(~mask, -math.inf)
        out_THE[rows] = torch.einsum("hts,she->the", score.softmax(-1), values)
    return out_THE


def _turned(x_TNE: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    x_TNE = x_TNE if weight is None else norm(x_TNE, weight, eps)
    one, two = x_TNE.chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def write(
    cache: BlockCache, layer: int, block_T: Tensor, slot_T: Tensor, k_TKE: Tensor, v_TKE: Tensor
) -> None:
    """Tokens into their slots of the cache."""
    keys, values = _lines(cache)
    if cache.bits == 8:
        k_TKE, cache_scales(cache.keys)[layer, block_T, :, slot_T] = encode(k_TKE)
        v_TKE, cache_scales(cache.values)[layer, block_T, :, slot_T] = encode(v_TKE)
    keys[layer, block_T, :, :, slot_T] = k_TKE.unflatten(2, (-1, 2)).to(keys.dtype)
    even = slot_T % 2 == 0  # the other token of the pair is 0 until it comes
    values[layer, block_T[even], :, :, slot_T[even] // 2, :, 1] = 0
    pairs = v_TKE.unflatten(2, (-1, 16)).to(values.dtype)
    values[layer, block_T, :, :, slot_T // 2, :, slot_T % 2] = pairs


def read(cache: BlockCache, layer: int, block_S: Tensor, slot_S: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 (S, K, E) keys and values of tokens in the cache."""
    keys, values = _lines(cache)
    k = keys[layer, block_S, :, :, slot_S].flatten(2).float()
    v = values[layer, block_S, :, :, slot_S // 2, :, slot_S % 2].flatten(2).float()
    if cache.bits == 16:
        return k, v
    k_scale = cache_scales(cache.keys)[layer, block_S, :, slot_S, None].float()
    v_scale = cache_scales(cache.values)[layer, block_S, :, slot_S, None].float()
    return k * k_scale, v * v_scale


def encode(x_TKE: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and bf16 scales (T, K): the largest magnitude / 127, of each token and head."""
    scale = (x_TKE.abs().amax(-1) / 127).bfloat16()
    codes = (x_TKE / scale.float()[..., None]).round().clamp(-127, 127)
    return codes.to(torch.int8), scale


def cache_scales(part: Tensor) -> Tensor:
    """bf16 (L, blocks, K, 16): what lies behind the codes of int8 keys or values."""
    return part[..., -32:].view(torch.bfloat16)


def _lines(cache: BlockCache) -> tuple[Tensor, Tensor]:
    """Keys (L, blocks, K, E / 2, 16, 2) and values (L, blocks, K, E / 16, 8, 16, 2)."""
    keys, values = cache.keys, cache.values
    if cache.bits == 8:
        keys, values = keys[..., :-32], values[..., :-32]
    return keys.unflatten(-1, (-1, 16, 2)), values.unflatten(-1, (-1, 8, 16, 2))
