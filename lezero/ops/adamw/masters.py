"""An fp32 master weight as a bf16 weight and the 16 bits it lacks. Lossless.

[Note: rounding ties away from zero]
The remainder is the low half of the master's bits, read as a signed number, and the weight is the
master rounded to the nearest bf16: `master = (weight << 16) + remainder`, as integers. A remainder
below zero says that the weight was rounded up. For that to hold at an exact tie, ties must always
go the same way: away from zero, where torch's own cast goes to the even neighbour. Both ways to
keep a master use this cast, so that they train bit for bit alike.

Every number survives the round trip, zeros, denormals and infinities included; a NaN comes back as
the quiet NaN of its sign. Numbers that bf16 rounds to infinity have an infinite weight, as with
torch's cast, and are themselves kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INFINITY, _QUIET = 0x7F800000, 0x7FC00000
_LOWEST = -(1 << 31)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 of any shape → (bf16 weight, int16 remainder) of that shape."""
    bits = canonical(master).view(torch.int32)
    # The addition may wrap only where the sign's bit would change, which a quiet NaN does not.
    weight = ((bits + 0x8000) >> 16).to(torch.int16)
    low = (bits & 0xFFFF).to(torch.int16)
    return weight.view(torch.bfloat16), low


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a bf16 weight and its int16 remainder.

    A weight that was written from outside keeps the old remainder: the master is then within half a
    unit in the last place of the weight; a zero never turns into anything else than a tiny number.
    """
    high = weight.contiguous().view(torch.int16).to(torch.int32)
    low = remainder.to(torch.int32)
    # Just below ±0 lie the NaNs of the other sign: no number has that pair.
    low = torch.where((high & 0x7FFF) == 0, low.clamp(min=0), low)
    return ((high << 16) + low).view(torch.float32)


def cast(master: Tensor) -> Tensor:
    """fp32 → bf16 to nearest, ties away from zero."""
    return split(master)[0]


def canonical(values: Tensor) -> Tensor:
    """fp32 with each NaN as the quiet NaN of its sign."""
    bits = values.contiguous().view(torch.int32)
    quiet = (bits & _LOWEST) | _QUIET
    return torch.where((bits & 0x7FFFFFFF) > _INFINITY, quiet, bits).view(torch.float32)
