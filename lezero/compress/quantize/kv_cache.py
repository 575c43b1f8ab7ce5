"""Keys and values of attention in int8 or int4: what a KV cache keeps of them.

Outliers of keys sit in a few channels, whatever the token, so keys share a scale along tokens, a
channel by itself; values have none, and share along channels, a token by itself (Liu et al., 2024,
"KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv:2402.02750, section 3.2).
Each head has scales of its own. For a group X of values, with b bits (section 3.1 there):

    z = min X        s = (max X - min X) / (2^b - 1)        code = round((x - z) / s)

and back: code · s + z. So the offset of a channel costs no codes, however large it is. z is one of
the values and stays in their type, exact; s is rounded up to 16 bits, so that the codes still reach
max X. An element is at most s / 2 from where it was; a group of one value comes back exactly.

[Note: ranges at the ends of a type]
All is computed in fp32 and halved, since max - min may overflow; and nothing comes back beyond the
largest value of the type it had. s is at least 2^-120, so that its inverse does not overflow.

Shapes: B batch, K key-value heads, S tokens, E width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.quantize import pack_nibbles, unpack_nibbles

_LEAST = 2.0**-120


@dataclass(frozen=True)
class QuantizedKV:
    """Codes and scales of keys or values.

    codes: uint8 (B, K, S, E), at 4 bits (B, K, S, E / 2), two channels a byte. scale, zero (what
    code 0 stands for): (B, K, S, E / group) shared along channels, (B, K, S / group, E) along
    tokens. scale is bf16 (fp16 for fp16 values), zero of the values' type (fp32 for fp64): 4 bytes
    a group for values of 16 bits, 6 for others.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: Literal[4, 8]
    group: int
    along: Literal["channel", "token"]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes


def quantize_kv(
    x_BKSE: Tensor,
    *,
    bits: Literal[4, 8] = 8,
    group: int | None = None,
    along: Literal["channel", "token"] = "channel",
) -> QuantizedKV:
    """Keys or values of (B, K, S, E) as codes between the least and the largest of each group.

    along: what shares a scale: `group` neighbouring channels of a token (default: the whole head),
    or a channel's `group` tokens in a row (default: 32). Tokens are given in whole groups, so a
    cache keeps the newest ones unquantized until a group is full.

    Raises `ConfigError` for shapes and groups that do not fit. A group that holds NaN or an
    infinity decodes to NaN.
    """
    tensor = isinstance(x_BKSE, Tensor)
    if not tensor or x_BKSE.dim() != 4 or not x_BKSE.is_floating_point() or not x_BKSE.shape[3]:
        got = f"{x_BKSE.dtype} {tuple(x_BKSE.shape)}" if tensor else f"a {type(x_BKSE).__name__}"
        raise ConfigError(
            f"quantize_kv: got {got}; allowed are floats of (batch, heads, tokens, width)"
        )
    if bits not in (4, 8) or along not in ("channel", "token"):
        raise ConfigError(
            f"quantize_kv: bits={bits!r}, along={along!r}; allowed are 4 or 8, 'channel' or 'token'"
        )
    width = x_BKSE.shape[3]
    if group is None:
        group = width if along == "channel" else 32
    size = width if along == "channel" else x_BKSE.shape[2]
    if isinstance(group, bool) or not isinstance(group, int) or group < 1 or size % group:
        raise ConfigError(
            f"quantize_kv: group={group} does not divide the {size} "
            f"{'channels' if along == 'channel' else 'tokens'}"
        )
    if bits == 4 and width % 2:
        raise ConfigError(f"quantize_kv: heads of width {width}; at 4 bits it is an even number")
    groups = _in_groups(x_BKSE.detach(), group, along)
    low, high = groups.amin(-1), groups.amax(-1)  # they take NaN and infinities on
    finite = torch.isfinite(low) & torch.isfinite(high)
    exact = (high / 2 - low / 2) / ((2**bits - 1) / 2)
    exact = torch.where(high > low, exact.clamp(min=_LEAST), exact)
    scale = _rounded_up(exact, torch.float16 if x_BKSE.dtype == torch.float16 else torch.bfloat16)
    scale = torch.where(finite, scale, torch.nan)
    half = torch.where(scale > 0, 2 / scale.float(), 0.0)[..., None]
    steps = groups.div_(2).sub_(low[..., None] / 2).mul_(half)
    codes = steps.round_().nan_to_num_(0.0).clamp_(0, 2**bits - 1).to(torch.uint8).flatten(-2)
    zero = low.to(torch.float32 if x_BKSE.dtype == torch.float64 else x_BKSE.dtype)
    if along == "token":
        codes, scale, zero = (part.transpose(2, 3) for part in (codes, scale, zero))
    codes = pack_nibbles(codes) if bits == 4 else codes.contiguous()
    return QuantizedKV(codes, scale.contiguous(), zero.contiguous(), bits, group, along)


def dequantize_kv(kept: QuantizedKV, dtype: torch.dtype = torch.float32) -> Tensor:
    """The (B, K, S, E) keys or values that the codes stand for."""
    width = kept.codes.shape[3] * (2 if kept.bits == 4 else 1)
    codes = unpack_nibbles(kept.codes, width) if kept.bits == 4 else kept.codes
    values = _in_groups(codes, kept.group, kept.along)
    scale, zero = kept.scale.float(), kept.zero.float()
    if kept.along == "token":
        scale, zero = scale.transpose(2, 3), zero.transpose(2, 3)
    values.mul_(scale[..., None] / 2).add_(zero[..., None] / 2).mul_(2)
    most = torch.finfo(kept.zero.dtype).max
    values = values.clamp_(-most, most).to(dtype).flatten(-2)
    return values.transpose(2, 3) if kept.along == "token" else values


def _in_groups(x_BKSE: Tensor, group: int, along: str) -> Tensor:
    """A copy in fp32 with what shares a scale last: (B, K, S, E / group, group), or along tokens
    (B, K, E, S / group, group)."""
    turned = x_BKSE if along == "channel" else x_BKSE.transpose(2, 3)
    return turned.unflatten(-1, (turned.shape[-1] // group, group)).to(torch.float32, copy=True)


def _rounded_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` (not negative) in `dtype`, of 16 bits, never less than it was."""
    near = x.to(dtype)
    above = (near.view(torch.int16) + 1).view(dtype)
    return torch.where(near.float() < x, above, near)
