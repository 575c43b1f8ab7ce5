"""Linear layers with the same inputs as one matrix, and the product with it.

[Note: forms of one matrix] A matrix has one form: bits, group, with zero points or without. Where
layers that are joined differ, a GGUF file that keeps one of them in 8 bits for example, all get a
form that holds every code as it is: 8 bits hold those of 4, a smaller group repeats the scale of a
larger one, and a zero point in the middle is none. So no value changes. Float layers, and GPTQ's
whose inputs lie in another order, have no codes to join: with them all become bf16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lezero.compress.quantize.modules import QuantizedEmbedding, QuantizedLinear
from lezero.compress.quantize.weights import PackedWeight
from lezero.ops.decoder import Weight
from lezero.ops.linear import (
    Packed,
    in_rows,
    linear_bf16,
    linear_int,
    linear_rounded,
    pack,
    pack_bf16,
    settled,
)
from lezero.ops.linear.reference import block_of


def merged(parts: Sequence[nn.Module], x_blocks: bool = False) -> Weight:
    """Linear layers (or an embedding) with the same inputs as one matrix, outputs in a row.

    See [Note: forms of one matrix]. `x_blocks`: inputs of codes that would be kept in 16 bits are
    rounded to 8, in blocks.
    """
    K = _features(parts[0])[1]
    N = sum(_features(part)[0] for part in parts)
    bias = _bias(parts)
    inputs = {(getattr(part, "x_bits", 16), getattr(part, "x_block", 0)) for part in parts}
    weights = [part.weight for part in parts if _has_codes(part)]
    if len(weights) == len(parts) and len(inputs) == 1:
        packed, bits, group = _joined([w for w in weights if isinstance(w, PackedWeight)])
        x_bits, x_block = inputs.pop()
        if x_blocks and x_bits == 16:
            x_bits, x_block = 8, block_of(group)
        return Weight(packed, bias, N, K, bits, group, x_bits, x_block)
    each = [_wide(part.weight) for part in parts]
    wide = each[0] if len(each) == 1 else torch.cat(each)
    no_scale = torch.empty(0, dtype=torch.float32, device="cpu")
    return Weight(Packed(pack_bf16(wide), no_scale, None), bias, N, K, 16)


def multiply(x: Tensor, weight: Weight, rounded: bool = False) -> Tensor:
    """Rows (R, K) times a weight: (R, N), each row's bits the same whatever the others are. fp32;
    rounded: in bf16, as prompts are multiplied by programs that take them apart."""
    packed, bias = weight.packed, weight.bias
    if weight.bits == 16:
        return linear_bf16(x, packed.weight, bias, out_features=weight.out_features)
    N, bits, group = weight.out_features, weight.bits, weight.group
    if rounded:
        return linear_rounded(x, packed, bias, out_features=N, bits=bits, group=group)
    return linear_int(
        *(x, packed, bias),
        out_features=N,
        bits=bits,
        group=group,
        x_bits=weight.x_bits,
        x_block=weight.x_block,
    )


def _features(part: Any) -> tuple[int, int]:
    N, K = part.weight.shape
    return int(N), int(K)


def _has_codes(part: nn.Module) -> bool:
    quantized = isinstance(part, QuantizedLinear | QuantizedEmbedding)
    return quantized and type(part.weight) is PackedWeight and part.input_scale is None


def _joined(weights: Sequence[PackedWeight]) -> tuple[Packed, int, int]:
    """All in one, its bits, and its group (0: a scale a row)."""
    grids = {weight.grid for weight in weights}
    bits, group = weights[0].grid.bits, weights[0].group
    if len(weights) == 1:
        return weights[0].parts(), bits, group
    full = all(weight.full_shape[0] % 16 == 0 or in_rows(weight.parts()) for weight in weights)
    if len(grids) == 1 and full:
        return _stacked([weight.parts() for weight in weights]), bits, group
    parts = [Packed(*weight.unpacked()) for weight in weights]
    if len(grids) > 1:
        bits = max(weight.grid.bits for weight in weights)
        group = math.gcd(*(weight.group for weight in weights))
        kinds = {part.scale.dtype for part in parts}
        kept = kinds.pop() if len(kinds) == 1 else torch.float32
        parts = [_in_form(weight, group, kept) for weight in weights]
    N, K = sum(weight.full_shape[0] for weight in weights), weights[0].full_shape[1]
    return settled(pack(*_stacked(parts), bits=bits), N, K, bits, group), bits, group


def _in_form(weight: PackedWeight, group: int, kept: torch.dtype) -> Packed:
    """Its codes counted from 0, with scales and zero points of `group` in `kept`."""
    codes, scale, zero = weight.unpacked()
    if zero is None:
        zero = torch.full_like(scale, 1 << (weight.grid.bits - 1))
    if codes.dtype == torch.int8:
        codes = codes.view(torch.uint8) ^ 128
    if group != weight.group:
        G = -(-weight.full_shape[1] // group)
        times = weight.group // group if weight.group else G
        scale, zero = (x.repeat_interleave(times, 1)[:, :G] for x in (scale, zero))
    return Packed(codes, scale.to(kept), zero.to(kept))


def _stacked(parts: Sequence[Packed]) -> Packed:
    """Packed weights, or codes and scales in rows, one behind the other."""
    zeros = [part.zero for part in parts if part.zero is not None]
    return Packed(
        torch.cat([part.weight for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(zeros) if zeros else None,
    )


def _wide(weight: Any) -> Tensor:
    found: Tensor = weight.decode() if hasattr(weight, "decode") else weight.detach()
    return found


def _bias(parts: Sequence[nn.Module]) -> Tensor | None:
    found = [getattr(part, "bias", None) for part in parts]
    if all(bias is None for bias in found):
        return None
    return torch.cat(
        [
            torch.zeros(_features(part)[0], dtype=torch.float32, device="cpu")
            if bias is None
            else bias.detach().float()
            for part, bias in zip(parts, found, strict=True)
        ]
    )
