"""How packed weights lie in memory: one layout for every kernel on CPUs, so that files hold it too.

Letters: N output features, K input features, P = ⌈N / 16⌉ panels of 16 output features, G groups.

    bf16   (P, ⌈K / 32⌉ · 16, 16, 2)  bf16   [panel][pair of inputs][output][which of the pair]
    8 bit  (P, ⌈K / 64⌉ · 16, 16, 4)  uint8  [panel][four inputs][output][which of the four]
    4 bit  (P, ⌈K / 64⌉ · 8, 16, 4)   uint8  [panel][eight inputs][output][which of the first four];
                                             the first four in the low halves of the bytes, the
                                             others in the high ones
    scale  (P, G, 16)  fp32, fp16 or bf16    [panel][group][output]; zero points alike

One line of 64 bytes is thus what one vector instruction multiplies for 16 outputs. Codes are
counted from 0: symmetric int8 is stored plus 128, symmetric int4 plus 8 (as `quantize` gives it).
Padding holds whatever codes and the scale 0.

Accelerators read 4 and 8 bits in rows (`rows.py`): `to_rows` and `from_rows` go between the two,
and the weight's dims tell them apart.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.linear import rows

PANEL = 16
BITS = (4, 8)
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_DEPTH = 64  # inputs are filled up to a multiple of it; bf16: 32


class Packed(NamedTuple):
    """A weight of 4 or 8 bits as kernels read it: plain tensors in one of the layouts above."""

    weight: Tensor
    scale: Tensor
    zero: Tensor | None


def pack_bf16(weight_NK: Tensor) -> Tensor:
    """A float (N, K) weight, rounded to bf16, in the packed layout."""
    _matrix("pack_bf16", weight_NK, weight_NK.is_floating_point(), "floats")
    N, K = weight_NK.shape
    shape = (-(-N // PANEL), -(-K // 32) * 16, PANEL, 2)
    packed = weight_NK.new_empty(shape, dtype=torch.bfloat16)
    # Some panels at a time: a vocabulary is large enough without copies of it.
    count = _rows_at_once(K)
    for first, part in zip(range(0, N, count), weight_NK.split(count), strict=True):
        made = _panels(part.bfloat16(), 32, 2)
        packed[first // PANEL : first // PANEL + len(made)] = made
    return packed


def unpack_bf16(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """The (N, K) bf16 weight that `pack_bf16` packed, bit for bit."""
    return _rows(packed)[:out_features, :in_features].contiguous()


def pack(codes_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, *, bits: int) -> Packed:
    """What `quantize` gave for an (N, K) weight, packed. `bits`: 4 or 8.

    `codes`: uint8 of 0 … 15 or 0 … 255, or int8 (8 bits, symmetric). `scale`, `zero`: (N, G) in a
    dtype that is kept, both the same. Raises `ConfigError` for anything else.
    """
    signed = codes_NK.dtype == torch.int8 and bits == 8 and zero_NG is None
    # Symmetric codes are counted from 0 already when there are four bits, never when there are 8.
    known = signed or (codes_NK.dtype == torch.uint8 and (bits == 4 or zero_NG is not None))
    _matrix("pack", codes_NK, known and bits in BITS, f"codes of {bits} bits")
    for name, x in (("scale", scale_NG), ("zero", zero_NG)):
        if x is None:
            continue
        if x.dim() != 2 or len(x) != len(codes_NK) or x.shape[1] < 1 or x.shape != scale_NG.shape:
            raise ConfigError(f"pack: {name} has shape {tuple(x.shape)}; it is (N, groups)")
        if x.dtype not in SCALE_DTYPES or x.dtype != scale_NG.dtype:
            raise ConfigError(
                f"pack: {name} is {x.dtype}; both are fp32, fp16 or bf16, and the same"
            )
    N, K = codes_NK.shape
    lines = -(-K // _DEPTH) * 2 * bits
    weight = codes_NK.new_empty(-(-N // PANEL), lines, PANEL, 4, dtype=torch.uint8)
    # Some panels at a time: a vocabulary's codes are large enough without copies of them.
    count = _rows_at_once(K)
    for first, part in zip(range(0, N, count), codes_NK.split(count), strict=True):
        # Adding 128 to eight bits turns the highest one over.
        codes = part.contiguous().view(torch.uint8) ^ 128 if signed else part
        _put(weight, first, codes, bits)
    return Packed(
        weight, _pack_groups(scale_NG), None if zero_NG is None else _pack_groups(zero_NG)
    )


def unpack(packed: Packed, out_features: int, in_features: int, *, bits: int, group: int) -> Packed:
    """The `codes`, `scale` and `zero` that `pack` packed, bit for bit, from panels or rows.

    `group`: inputs that share a scale, 0 for a scale a row.
    """
    N, K = out_features, in_features
    weight, scale, zero = packed
    codes = weight.new_empty(N, K, dtype=torch.uint8)
    count = _rows_at_once(K)
    for first in range(0, N, count):
        codes[first : first + count] = _codes(packed, first, count, N, K, bits, group)
    if bits == 8 and zero is None:
        codes = codes.bitwise_xor_(128).view(torch.int8)
    if in_rows(packed):
        return Packed(codes, scale, zero)
    zero = None if zero is None else _unpack_groups(zero, N)
    return Packed(codes, _unpack_groups(scale, N), zero)


def in_rows(packed: Packed) -> bool:
    """Whether it lies in rows; else in panels."""
    return packed.weight.dim() == 2


def to_rows(packed: Packed, out_features: int, in_features: int, bits: int, group: int) -> Packed:
    """A weight in panels put in rows, as accelerators read it; one in rows as it is."""
    if in_rows(packed):
        return packed
    N, K = out_features, in_features
    shape = (N, rows.width(K, bits, group))
    dtype = torch.int8 if bits == 8 else torch.int32
    weight = packed.weight.new_empty(shape, dtype=dtype)
    count = _rows_at_once(K)
    for first in range(0, N, count):
        codes = _codes(packed, first, count, N, K, bits, group)
        weight[first : first + count] = rows.encode(codes, bits, group)
    _, scale, zero = packed
    return Packed(
        weight, _unpack_groups(scale, N), None if zero is None else _unpack_groups(zero, N)
    )


def from_rows(packed: Packed, out_features: int, in_features: int, bits: int, group: int) -> Packed:
    """A weight in rows put in panels, bit for bit as `pack` gave it; one in panels as it is."""
    if not in_rows(packed):
        return packed
    N, K = out_features, in_features
    shape = (-(-N // PANEL), -(-K // _DEPTH) * 2 * bits, PANEL, 4)
    weight = packed.weight.new_empty(shape, dtype=torch.uint8)
    count = _rows_at_once(K)
    for first in range(0, N, count):
        _put(weight, first, _codes(packed, first, count, N, K, bits, group), bits)
    _, scale, zero = packed
    return Packed(weight, _pack_groups(scale), None if zero is None else _pack_groups(zero))


def settled(packed: Packed, out_features: int, in_features: int, bits: int, group: int) -> Packed:
    """In the layout that kernels of its device read."""
    change = to_rows if rows.takes_rows(packed.weight.device) else from_rows
    return change(packed, out_features, in_features, bits, group)


def _codes(packed: Packed, first: int, count: int, N: int, K: int, bits: int, group: int) -> Tensor:
    """Codes counted from 0 (uint8) of `count` outputs from `first`, a multiple of 16, on."""
    if in_rows(packed):
        return rows.decode(packed.weight[first : first + count], K, bits, group)
    panels = packed.weight[first // PANEL : -(-(first + count) // PANEL)]
    return _rows(eights(panels) if bits == 4 else panels)[: min(count, N - first), :K]


def _put(weight: Tensor, first: int, codes: Tensor, bits: int) -> None:
    """Writes codes counted from 0 to the panels from output `first`, a multiple of 16, on."""
    made = _panels(codes, _DEPTH, 4)
    if bits == 4:
        pairs = made.unflatten(1, (-1, 2))
        made = pairs[:, :, 0] | pairs[:, :, 1] << 4
    weight[first // PANEL : first // PANEL + len(made)] = made


def _rows_at_once(K: int) -> int:
    return max(1, rows.AT_ONCE // (K * PANEL)) * PANEL


def eights(weight: Tensor) -> Tensor:
    """Panels of 4 bits with a byte a code, laid out as those of 8 bits."""
    return torch.stack([weight & 15, weight >> 4], 2).flatten(1, 2)


def padded_inputs(packed: Packed, bits: int) -> int:
    """K with its padding."""
    if in_rows(packed):
        return packed.weight.shape[1] * (8 if bits == 4 else 1)
    return packed.weight.shape[1] * (8 if bits == 4 else 4)


def _panels(x_NK: Tensor, depth: int, together: int) -> Tensor:
    N, K = x_NK.shape
    x = torch.nn.functional.pad(x_NK, (0, -K % depth, 0, -N % PANEL))
    x = x.view(-1, PANEL, x.shape[1] // together, together)
    return x.transpose(1, 2).contiguous()


def _rows(packed: Tensor) -> Tensor:
    return packed.transpose(1, 2).flatten(2).flatten(0, 1)


def _pack_groups(x_NG: Tensor) -> Tensor:
    x = torch.nn.functional.pad(x_NG, (0, 0, 0, -len(x_NG) % PANEL))
    return x.view(-1, PANEL, x.shape[1]).transpose(1, 2).contiguous()


def _unpack_groups(x: Tensor, N: int) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)[:N].contiguous()


def _matrix(what: str, x: Tensor, known: bool, allowed: str) -> None:
    if x.dim() != 2 or 0 in x.shape or not known:
        raise ConfigError(
            f"{what}: got {x.dtype} {tuple(x.shape)}; allowed are {allowed}, (N, K), not empty"
        )
