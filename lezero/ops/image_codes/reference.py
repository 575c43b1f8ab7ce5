"""The codes in plain PyTorch: what every kernel is held to, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor


def image_codes(x: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """See `lezero.ops.image_codes.op`."""
    wide = x.float()
    bad_B = ~torch.isfinite(wide.flatten(1)).all(1)
    codes = torch.round(wide / scale.reshape(()).float()) + zero.reshape(()).float()
    return codes.nan_to_num(0.0).clamp(0, 255).to(torch.uint8), bad_B
