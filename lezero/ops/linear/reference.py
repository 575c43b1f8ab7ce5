"""Linear layers on packed weights in plain PyTorch: the formulas that every kernel is held to.

    bf16    y = x wᵀ + bias; x in bf16 as it is, in fp32 and fp16 as the sum of two bf16 (AVX2,
            and others that multiply in fp32, take it as it is)
    4, 8 bits, x of 8 bits (A8): a (int8), t from `quantize_tokens`, for each group g of inputs
                y = t · Σ_g s_g · Σ_k a (w - z) + bias
    4, 8 bits, x of 16 bits (A16): a (int16), t_b from `fixed_point`, or of 8 bits in blocks: a
    (int8), t_b from `quantize_blocks`, for each block b of inputs
                y = Σ_b (s_b · t_b) · Σ_k a (w - z) + bias

    fp8     y = (t · a) (s · w)ᵀ + bias; a (float8) and t from `fp8_tokens`, both factors in x's
            dtype, as torch multiplies those

The inner sums of 4 and 8 bits are of whole numbers and exact (with zero points that are whole); the
outer ones go through blocks in order, in fp32, each product and addition rounded once (fused). W8A8
with a scale a row has one inner sum, and y = (t · s) · it + bias, each rounded.

[Note: blocks]
A block is the widest of 128, 64 and 32 inputs that divides the group; 128 with a scale a row.
Inputs of 8 bits in blocks say themselves how many share a scale: one of these, which divides the
group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lezero.ops.linear import rows
from lezero.ops.linear.layout import Packed, eights, in_rows, pack_bf16, unpack, unpack_bf16
from lezero.ops.quantize.tokens import (
    fixed_point,
    fp8_tokens,
    quantize_blocks,
    quantize_tokens,
)

BLOCKS = (128, 64, 32)


def block_of(group: int) -> int:
    """Inputs that are summed as whole numbers at a time; `group` 0: one scale a row."""
    return next(size for size in BLOCKS if group % size == 0)


def linear_bf16(x_MK: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """(M, N) in x's dtype."""
    w_NK = unpack_bf16(weight, out_features, x_MK.shape[1]).float()
    high = x_MK.bfloat16().float()
    out = high @ w_NK.T
    if x_MK.dtype != torch.bfloat16:
        low = (x_MK.float() - high).bfloat16().float()
        # An infinity has no remainder: it would turn into a NaN.
        out = out + torch.where(torch.isfinite(high), low, 0.0) @ w_NK.T
    return (out if bias is None else out + bias.float()).to(x_MK.dtype)


def linear_rounded(
    x_MK: Tensor, packed: Packed, bias: Tensor | None, out_features: int, bits: int, group: int
) -> Tensor:
    """(M, N) in bf16: `linear_bf16` of the dequantized weight. With a scale a row only the power of
    two in it counts for that, since bf16 holds whole codes, and the sums take the rest."""
    sizes = (out_features, x_MK.shape[1], bits, group)
    x_MK = x_MK.bfloat16()
    if group:
        weight = pack_bf16(dequantize_packed(packed, *sizes))
        return linear_bf16(x_MK, weight, bias, out_features)
    whole, left = power_apart(packed.scale)
    weight = pack_bf16(dequantize_packed(packed._replace(scale=whole), *sizes))
    sums_MN = linear_bf16(x_MK.float(), weight, None, out_features)
    left_N1 = unpack(packed._replace(scale=left), *sizes[:2], bits=bits, group=group)[1]
    return finish(sums_MN, left_N1.T, bias, torch.bfloat16)


def power_apart(scale: Tensor) -> tuple[Tensor, Tensor]:
    """The power of two in each scale, 2**-100 to 2**100, and what is left of it, both in fp32."""
    power = (torch.frexp(scale.float()).exponent - 1).clamp(-100, 100)
    power = torch.where(scale == 0, -100, power)
    return torch.ldexp(torch.ones_like(scale.float()), power), torch.ldexp(scale.float(), -power)


def linear_int(
    x_MK: Tensor,
    packed: Packed,
    bias: Tensor | None,
    x_scale: Tensor | None,
    out_features: int,
    bits: int,
    group: int,
    x_bits: int,
    x_block: int = 0,
) -> Tensor:
    """(M, N) in x's dtype."""
    N, K = out_features, x_MK.shape[1]
    codes_NK, scale_NG, zero_NG = unpack(packed, N, K, bits=bits, group=group)
    scale_NG = scale_NG.float()
    if bits == 4 and zero_NG is None:
        codes_NK = codes_NK.to(torch.int16) - 8
    of_token = x_bits == 8 and not x_block
    size = x_block or block_of(group)
    if of_token:
        a_MK, token_M = quantize_tokens(x_MK, x_scale)
        if not group and bits == 8 and zero_NG is None:
            total = (a_MK.double() @ codes_NK.double().T).float()
            return finish(total, token_M[:, None] * scale_NG.T, bias, x_MK.dtype)
    else:
        blocks = quantize_blocks if x_block else fixed_point
        a_MK, token_MB = blocks(x_MK, size)
    out = x_MK.new_zeros(len(x_MK), out_features, dtype=torch.float32)
    for block, begin in enumerate(range(0, x_MK.shape[1], size)):
        w_NB = codes_NK[:, begin : begin + size].double()
        a_MB = a_MK[:, begin : begin + w_NB.shape[1]].double()
        at = begin // group if group else 0
        total = (a_MB @ w_NB.T).float()
        if zero_NG is not None:
            total = _fused(-zero_NG[:, at].float(), a_MB.sum(1)[:, None].float(), total)
        scale = scale_NG[:, at]
        if not of_token:
            scale = scale * token_MB[:, block, None]
        out = _fused(scale, total, out)
    ones = torch.ones((), dtype=torch.float32, device=out.device)
    return finish(out, token_M[:, None] if of_token else ones, bias, x_MK.dtype)


def linear_fp8(x_MK: Tensor, codes_NK: Tensor, scale_N1: Tensor, bias: Tensor | None) -> Tensor:
    """(M, N) in x's dtype."""
    a_MK, token_M = fp8_tokens(x_MK)
    rounded = (a_MK.float() * token_M[:, None]).to(x_MK.dtype)
    wide = (codes_NK.float() * scale_N1).to(x_MK.dtype)
    bias = None if bias is None else bias.to(x_MK.dtype)
    return torch.nn.functional.linear(rounded, wide, bias)


def dequantize_packed(
    packed: Packed, out_features: int, in_features: int, bits: int, group: int
) -> Tensor:
    """The fp32 (N, K) weight that a packed one stands for."""
    codes, scale, zero = unpack(packed, out_features, in_features, bits=bits, group=group)
    wide = codes.float()
    spread = (
        (lambda x: x.float().repeat_interleave(group, 1)[:, :in_features])
        if group
        else Tensor.float
    )
    if zero is not None:
        wide = wide - spread(zero)
    elif bits == 4:
        wide = wide - 8
    return wide * spread(scale)


def embedding(
    ids: Tensor, packed: Packed, in_features: int, bits: int, group: int, dtype: torch.dtype
) -> Tensor:
    """Rows `ids` (flat) of the weight that `packed` stands for: (len(ids), K)."""
    weight, scale, zero = packed
    if in_rows(packed):
        codes = rows.decode(weight[ids], in_features, bits, group)
        found = [None if x is None else x[ids] for x in (scale, zero)]
    else:
        panel, row = ids // 16, ids % 16
        lines = weight[panel, :, row]
        codes = (eights(lines) if bits == 4 else lines).flatten(1)[:, :in_features]
        found = [None if x is None else x[panel, :, row] for x in (scale, zero)]

    def per_input(x: Tensor) -> Tensor:
        wide = x.float()
        return wide.repeat_interleave(group, 1)[:, :in_features] if group else wide

    of_scale, of_zero = found
    assert of_scale is not None
    start = (128.0 if bits == 8 else 8.0) if of_zero is None else per_input(of_zero)
    return ((codes.float() - start) * per_input(of_scale)).to(dtype)


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c of fp32 values, rounded once. In fp64 the product is exact; a sum that is not is
    made odd towards what it lacks, so that it is no tie, which `float` would round once more."""
    product, c = torch.broadcast_tensors(a.double() * b.double(), c.double())
    total = product + c
    part = total - product
    rest = (product - (total - part)) + (c - part)  # NaN beyond the finite ones
    bits = total.view(torch.int64)
    even = ((bits & 1) == 0) & ((rest > 0) | (rest < 0))
    step = torch.where((rest > 0) == (total > 0), 1, -1)
    return torch.where(even, bits + step, bits).view(torch.float64).float()


def finish(out: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """out · factor + bias, each rounded in fp32, in `dtype`."""
    out = out * factor
    return (out if bias is None else out + bias.float()).to(dtype)
