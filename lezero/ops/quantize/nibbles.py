"""Two 4-bit codes in a byte: element 2i of a row in the low half of byte i, 2i + 1 in the high."""

from __future__ import annotations

import torch
from torch import Tensor

from lezero.core.errors import ConfigError


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes of 0 … 15, (…, K) → uint8 (…, ⌈K / 2⌉). A last odd one has 0 beside it."""
    if codes.dtype != torch.uint8 or codes.dim() == 0:
        raise ConfigError(
            f"pack_nibbles: got {codes.dtype} {tuple(codes.shape)}; allowed is uint8, (…, K)"
        )
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack_nibbles(packed: Tensor, count: int) -> Tensor:
    """The first `count` codes of each row of what `pack_nibbles` gave."""
    if packed.dtype != torch.uint8 or packed.dim() == 0 or -(-count // 2) != packed.shape[-1]:
        raise ConfigError(
            f"unpack_nibbles: got {packed.dtype} {tuple(packed.shape)} for {count} codes a row; "
            f"allowed is uint8, (…, {-(-count // 2)})"
        )
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., :count]
