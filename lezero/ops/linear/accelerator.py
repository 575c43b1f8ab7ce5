"""Linear layers of 4 and 8 bits on an accelerator.

W8A8 with a scale a row is one product of whole numbers, by the units for int8 (`torch._int_mm`):
the reference's result, bit for bit. Everything else is near it: few tokens go to Triton where there
is one, many are multiplied with the dequantized weight; tokens of 8 bits (A8) are rounded before.
The reference itself would multiply in fp64, which most accelerators do at a small part of their
speed, or not at all.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from lezero.core.log import logger
from lezero.ops.linear import reference
from lezero.ops.linear.layout import PANEL, Packed, padded_inputs, unpack
from lezero.ops.quantize.tokens import quantize_tokens

_LEAST_TOKENS = 17  # of torch._int_mm


def linear_int(
    x_MK: Tensor,
    packed: Packed,
    bias: Tensor | None,
    x_scale: Tensor | None,
    out_features: int,
    bits: int,
    group: int,
    x_bits: int,
) -> Tensor:
    """(M, N) in x's dtype. `x_MK` is contiguous."""
    sizes = (out_features, bits, group)
    if x_bits == 8:
        a_MK, token_M = quantize_tokens(x_MK, x_scale)
        if bits == 8 and not group and packed.zero is None and _multiplies_int8(x_MK.device.type):
            total, scale_1N = _product(a_MK, packed, out_features)
            return reference.finish(total, token_M[:, None] * scale_1N, bias, x_MK.dtype)
        x_MK = (a_MK * token_M[:, None]).to(x_MK.dtype)
    if x_MK.device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from lezero.ops.linear import triton_kernel

        if len(x_MK) <= triton_kernel.MOST_TOKENS:
            return triton_kernel.linear_int(x_MK, packed, bias, *sizes)
    wide = reference.dequantize_packed(packed, out_features, x_MK.shape[1], bits, group)
    bias = None if bias is None else bias.to(x_MK.dtype)
    return torch.nn.functional.linear(x_MK, wide.to(x_MK.dtype), bias)


def _product(a_MK: Tensor, packed: Packed, N: int) -> tuple[Tensor, Tensor]:
    """Σ_k a w, exact and then fp32 (M, N), and the weight's scales (1, N)."""
    M, K = a_MK.shape
    # Inputs and outputs must be multiples of 8: the packed weight, with its padding, is.
    outputs, inputs = len(packed.weight) * PANEL, padded_inputs(packed.weight, 8)
    codes, scale, _ = unpack(packed, outputs, inputs, bits=8)
    a = torch.nn.functional.pad(a_MK, (0, inputs - K, 0, max(0, _LEAST_TOKENS - M)))
    return torch._int_mm(a, codes.T)[:M, :N].float(), scale[:N].float().T


@functools.cache
def _multiplies_int8(device: str) -> bool:
    """Tried once, since torch has no list of those that do."""
    a = torch.zeros(2 * PANEL, 2 * PANEL, dtype=torch.int8, device=device)
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
