"""Linear layers of 4 and 8 bits on an accelerator, from weights in rows (`rows.py`).

W8A8 with a scale a row is one product of whole numbers, by the units for int8 (`triton_w8a8.py`,
else `torch._int_mm`): the reference's result, bit for bit. Everything else is near it: few tokens
multiply the codes where they are read (`cuda_few.py`, `triton_few.py`), many are multiplied with
the dequantized weight; tokens of 8 bits (A8) are rounded before. The reference itself would
multiply in fp64, which most accelerators do at a small part of their speed, or not at all. Without
triton, and on other accelerators than NVIDIA's and AMD's, the same is done in plain PyTorch. Panels
are put in rows at each call.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from lezero.core.log import logger
from lezero.ops import cuda_source
from lezero.ops.linear import cuda_few, reference
from lezero.ops.linear.layout import Packed, in_rows, to_rows
from lezero.ops.quantize.tokens import quantize_blocks, quantize_tokens
from lezero.ops.triton_runs import triton_runs

FEW_TOKENS = 64
"""Up to here codes are multiplied where they are read; more tokens share a dequantized weight."""
_LEAST_TOKENS = 32  # torch._int_mm takes more than 16
_INT8_OUTPUTS = 8  # of torch._int_mm: it takes multiples of them


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
    """(M, N) in x's dtype. `x_MK` is contiguous."""
    K = x_MK.shape[1]
    sizes = (out_features, K, bits, group)
    if not len(x_MK):
        return x_MK.new_empty(0, out_features)
    packed = to_rows(packed, *sizes)
    if x_block:
        a_MK, token_MB = quantize_blocks(x_MK, x_block)
        wide = a_MK.unflatten(1, (token_MB.shape[1], -1)) * token_MB[..., None]
        x_MK = wide.flatten(1)[:, :K].to(x_MK.dtype).contiguous()
    elif x_bits == 8:
        if bits == 8 and not group and packed.zero is None and _multiplies_int8(x_MK.device):
            return _whole(x_MK, packed, bias, x_scale)
        a_MK, token_M = _tokens(x_MK, x_scale, K)
        x_MK = (a_MK * token_M[:, None]).to(x_MK.dtype)
    fewest = len(x_MK) <= cuda_few.MOST_TOKENS and cuda_few.suits(x_MK.dtype, K, bits, group)
    if fewest and cuda_source.runs(x_MK.device) and cuda_few.aligned(packed):
        x = cuda_few.sliced(x_MK)
        return cuda_few.linear_few(x, len(x_MK), packed, bias, *sizes, early=False)
    if len(x_MK) <= FEW_TOKENS and triton_runs(x_MK.device):
        from lezero.ops.linear import triton_few

        if triton_few.suits(x_MK.dtype, bits, group):
            return triton_few.linear_few(x_MK, packed, bias, *sizes)
    bias = None if bias is None else bias.to(x_MK.dtype)
    return linear(x_MK, dequantize(packed, *sizes, x_MK.dtype), bias)


def dequantize(
    packed: Packed,
    out_features: int,
    in_features: int,
    bits: int,
    group: int,
    dtype: torch.dtype,
) -> Tensor:
    """The (N, K) weight that a packed one stands for; on the CPU too."""
    sizes = (out_features, in_features, bits, group)
    if in_rows(packed) and triton_runs(packed.weight.device):
        from lezero.ops.linear import triton_rows

        return triton_rows.dequantize(packed, *sizes, dtype)
    return reference.dequantize_packed(packed, *sizes).to(dtype)


def embedding(
    ids: Tensor, packed: Packed, in_features: int, bits: int, group: int, dtype: torch.dtype
) -> Tensor:
    """Rows `ids` (flat, int64) of the weight: (len(ids), K).

    By triton, an id that the weight does not have gives a row of NaN; else it is torch's error.
    """
    if in_rows(packed) and triton_runs(packed.weight.device):
        from lezero.ops.linear import triton_rows

        return triton_rows.embedding(ids, packed, in_features, bits, group, dtype)
    return reference.embedding(ids, packed, in_features, bits, group, dtype)


def _tokens(x_MK: Tensor, x_scale: Tensor | None, columns: int) -> tuple[Tensor, Tensor]:
    """`quantize_tokens`, filled up to so many columns, by zeros."""
    if triton_runs(x_MK.device):
        from lezero.ops.linear import triton_tokens

        return triton_tokens.quantize_tokens(x_MK, x_scale, columns)
    a_MK, token_M = quantize_tokens(x_MK, x_scale)
    return pad(a_MK, (0, columns - x_MK.shape[1])), token_M


def _whole(x_MK: Tensor, packed: Packed, bias: Tensor | None, x_scale: Tensor | None) -> Tensor:
    """W8A8 with a scale a row: (t · s) · Σ_k a w + bias, with sums that are exact."""
    M, (weight, scale, _) = len(x_MK), packed
    N, columns = weight.shape
    a_MK, token_M = _tokens(x_MK, x_scale, columns)
    if triton_runs(x_MK.device):
        from lezero.ops.linear import triton_w8a8

        return triton_w8a8.linear_w8a8(a_MK, token_M, weight, scale, bias, x_MK.dtype)
    a_MK = pad(a_MK, (0, 0, 0, max(0, _LEAST_TOKENS - M)))
    if N % _INT8_OUTPUTS:  # a copy in each call, for outputs that models hardly have
        weight = pad(weight, (0, 0, 0, -N % _INT8_OUTPUTS))
    total_MN = torch._int_mm(a_MK, weight.T)[:M, :N]
    factor = token_M[:, None] * scale.float().T
    return reference.finish(total_MN.float(), factor, bias, x_MK.dtype)


def _multiplies_int8(device: torch.device) -> bool:
    return triton_runs(device) or _torch_multiplies_int8(device.type)


@functools.cache
def _torch_multiplies_int8(device: str) -> bool:
    """Tried once, since torch has no list of those that do."""
    a = torch.zeros(32, 32, dtype=torch.int8, device=device)
    try:
        torch._int_mm(a, a.T)
    except RuntimeError as error:
        logger("ops").info(
            "torch does not multiply int8 on %s (%s): layers of 8-bit weights and activations run "
            "as dense products",
            device,
            str(error).partition("\n")[0],
        )
        return False
    return True
