"""How packed weights lie in the memory of an accelerator: output after output, inputs in a row.

Letters: N output features, K input features, G groups, J words side by side.

    8 bit  (N, K up to a multiple of 16)  int8   signed codes: those counted from 0, minus 128
    4 bit  (N, ⌈K / 8 J⌉ · J)             int32  bits 4 i … 4 i + 3 of word b J + j hold the code,
                                                 counted from 0, of input 8 b J + i J + j
    scale  (N, G)  fp32, fp16 or bf16            zero points alike, for codes counted from 0

J is 64 where the group is a multiple of 64 or there is a scale a row, else 32. So neighbouring
threads read neighbouring words, and the J codes that they take from the same bits share a scale.
Padding holds the code 0. Files hold the panels of `layout.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

AT_ONCE = 1 << 22
"""Codes that are put in another order together: a vocabulary is large enough without copies."""
_ALIGNED = 16  # inputs of 8 bits: a row begins where wide loads, and int8 products, want it


def takes_rows(device: torch.device) -> bool:
    """Whether kernels of `device` read rows."""
    return device.type not in ("cpu", "meta")


def run_of(group: int) -> int:
    """J of 4 bits."""
    return 64 if group % 64 == 0 else 32


def width(in_features: int, bits: int, group: int) -> int:
    """Columns of a weight in rows."""
    if bits == 8:
        return -(-in_features // _ALIGNED) * _ALIGNED
    J = run_of(group)
    return -(-in_features // (8 * J)) * J


def encode(codes_NK: Tensor, bits: int, group: int) -> Tensor:
    """Codes counted from 0 (uint8) as a weight in rows."""
    N, K = codes_NK.shape
    columns = width(K, bits, group)
    if bits == 8:
        return torch.nn.functional.pad((codes_NK ^ 128).view(torch.int8), (0, columns - K))
    J = run_of(group)
    codes = torch.nn.functional.pad(codes_NK, (0, 8 * columns - K)).view(N, -1, 8, J)
    words = codes[:, :, 0].to(torch.int32)
    for i in range(1, 8):
        words |= codes[:, :, i].to(torch.int32) << 4 * i
    return words.flatten(1)


def decode(weight: Tensor, in_features: int, bits: int, group: int) -> Tensor:
    """The codes (…, K), counted from 0 (uint8), of a weight in rows or of some of its rows."""
    if bits == 8:
        return weight[..., :in_features].contiguous().view(torch.uint8) ^ 128
    words = weight.unflatten(-1, (-1, run_of(group)))
    codes = [(words >> 4 * i & 15).to(torch.uint8) for i in range(8)]
    return torch.stack(codes, -2).flatten(-3)[..., :in_features]
