"""`image_codes`: the kernel of this machine where it fits, or PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from lezero.ops.image_codes import reference
from lezero.ops.image_codes.native import NATIVE

_TYPES = (torch.float32, torch.bfloat16)
_FORMATS = (torch.contiguous_format, torch.channels_last)


def image_codes(x: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Of x (B, C, …): uint8 codes that lie as x does, clamp(round(x / scale) + zero, 0, 255), and
    which samples hold what is not finite, bool (B,); NaN has the code 0.

    scale (fp32) and zero (0 … 255): one element each, for all of x.
    """
    if x.device.type != "cpu" or not x.numel() or not NATIVE.available():
        return reference.image_codes(x, scale, zero)
    x = x.detach() if x.dtype in _TYPES else x.detach().float()
    if not any(x.is_contiguous(memory_format=form) for form in _FORMATS[: 1 + (x.dim() == 4)]):
        x = x.contiguous()
    codes = torch.empty_like(x, dtype=torch.uint8)
    bad_B = torch.empty(len(x), dtype=torch.bool, device="cpu")
    NATIVE.ops.image_codes(x, codes, bad_B, float(scale), float(zero))
    return codes, bad_B
