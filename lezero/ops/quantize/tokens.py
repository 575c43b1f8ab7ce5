"""Activations of 8 and 16 bits, as codes and scales: of a token, or of each block of it.

int8 is what W8A8 and W4A8 multiply, with a scale a token, or one for each block of 32, 64 or 128
elements of it, whose largest becomes 127. float8_e4m3fn, where a token's largest becomes 448, is
what fp8 weights are multiplied with. 16 bits are what W8A16 and W4A16 multiply: of each block the
largest becomes 32,639 = 127 · 256 + 127, so that a value is two int8 digits, high · 256 + low; an
element's error is at most 1.6e-5 of its block's largest. bf16 loses up to 2.0e-3 of each element by
itself: more where a block's values are of like size, less for those that are some 200 times smaller
than the largest, which below 1.5e-5 of it become 0. Sums of products are then exact whole numbers,
whatever the order, so that a token's result does not depend on the batch or on the kernel.

[Note: tokens that are not finite]
A token (or a block that has its own scale) with a NaN or an infinity has the scale NaN and codes 0,
also where the scale was given. A finite value beyond a given scale saturates.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT8_LEVELS = 127.0
INT16_LEVELS = 32639.0
FP8_LEVELS = 448.0


def quantize_tokens(x_MK: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """int8 codes (M, K) and fp32 scales (M,): each token's own, or the given one (one element)."""
    wide = x_MK.float()
    if scale is None:
        return _levels(wide, INT8_LEVELS, torch.int8)
    finite = torch.isfinite(wide).all(-1)
    step = scale.reshape(()).float()
    inverse = torch.where(step >= 2.0**-126, 1 / step, 0.0)
    codes = torch.round(wide * inverse).clamp(-INT8_LEVELS, INT8_LEVELS)
    codes = torch.where(finite[:, None], codes, 0.0).to(torch.int8)
    return codes, torch.where(finite, step, torch.nan)


def fp8_tokens(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn codes (M, K), nearest with halves to even, and fp32 scales (M,)."""
    return _levels(x_MK.float(), FP8_LEVELS, torch.float8_e4m3fn)


def fixed_point(x_MK: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """int16 codes (M, blocks · block), zeros past K, and fp32 scales (M, blocks)."""
    return _blocks(x_MK, block, INT16_LEVELS, torch.int16)


def quantize_blocks(x_MK: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """int8 codes (M, blocks · block), zeros past K, and fp32 scales (M, blocks)."""
    return _blocks(x_MK, block, INT8_LEVELS, torch.int8)


def _blocks(x_MK: Tensor, block: int, levels: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = torch.nn.functional.pad(x_MK.float(), (0, -x_MK.shape[1] % block))
    codes, scale = _levels(wide.unflatten(1, (-1, block)), levels, dtype)
    return codes.flatten(1), scale


def _levels(x: Tensor, levels: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not x.shape[-1]:
        return x.to(dtype), x.new_zeros(x.shape[:-1])
    most = x.abs().amax(-1)
    finite = torch.isfinite(x).all(-1)
    # By a tensor: CUDA multiplies with 1 / levels where that is a number.
    scale = most / torch.full_like(most, levels)
    scale = torch.where(scale < 2.0**-126, 0.0, scale)
    inverse = torch.where(finite & (scale > 0), 1 / scale, 0.0)
    scaled = torch.where(finite[..., None], x, 0.0) * inverse[..., None]
    codes = scaled if dtype.is_floating_point else torch.round(scaled)
    return codes.clamp(-levels, levels).to(dtype), torch.where(finite, scale, torch.nan)
