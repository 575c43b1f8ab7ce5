"""Keys and values of attention in int8 or int4: what a KV cache keeps of them.

Outliers of keys sit in a few channels, whatever the token, so keys share a scale along tokens, a
channel by itself; values have none, and share along channels, a token by itself (Liu et al., 2024,
"KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv:2402.02750, section 3.2).
Each head has scales of its own.

Shapes: B batch, K key-value heads, S tokens, E width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.ops.quantize import Grid, dequantize, pack_nibbles, quantize, unpack_nibbles


@dataclass(frozen=True)
class QuantizedKV:
    """Codes and scales of keys or values.

    codes: uint8 (B, K, S, E), at 4 bits (B, K, S, E / 2), two channels a byte. scale, zero:
    (B, K, S, E / group) shared along channels, (B, K, S / group, E) along tokens; fp16 or bf16.
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
    """Keys or values of (B, K, S, E) as codes with zero points.

    along: what shares a scale: `group` neighbouring channels of a token (default: the whole head),
    or a channel's `group` tokens in a row (default: 32). Tokens are given in whole groups, so a
    cache keeps the newest ones unquantized until a group is full.

    Raises `ConfigError` for shapes and groups that do not fit. NaN and infinities decode to NaN.
    """
    if x_BKSE.dim() != 4 or not x_BKSE.is_floating_point() or not x_BKSE.shape[3]:
        raise ConfigError(
            f"quantize_kv: got {x_BKSE.dtype} {tuple(x_BKSE.shape)}; allowed are floats of (batch, "
            "heads, tokens, width)"
        )
    if bits not in (4, 8) or along not in ("channel", "token"):
        raise ConfigError(
            f"quantize_kv: bits={bits!r}, along={along!r}; allowed are 4 or 8, 'channel' or 'token'"
        )
    width = x_BKSE.shape[3]
    group = group or (width if along == "channel" else 32)
    size = width if along == "channel" else x_BKSE.shape[2]
    if group < 1 or size % group:
        raise ConfigError(
            f"quantize_kv: group={group} does not divide the {size} "
            f"{'channels' if along == 'channel' else 'tokens'}"
        )
    if bits == 4 and width % 2:
        raise ConfigError(f"quantize_kv: heads of width {width}; at 4 bits it is an even number")
    kept: Literal["fp16", "bf16"] = "fp16" if x_BKSE.dtype == torch.float16 else "bf16"
    grid = Grid("int8" if bits == 8 else "int4", group, True, kept)
    turned = x_BKSE if along == "channel" else x_BKSE.transpose(2, 3)
    codes, scale, zero = quantize(turned, grid)
    assert zero is not None
    if along == "token":
        codes, scale, zero = (part.transpose(2, 3) for part in (codes, scale, zero))
    dtype = torch.float16 if kept == "fp16" else torch.bfloat16
    return QuantizedKV(
        pack_nibbles(codes) if bits == 4 else codes.contiguous(),
        scale.to(dtype).contiguous(),
        zero.to(dtype).contiguous(),
        bits,
        group,
        along,
    )


def dequantize_kv(kept: QuantizedKV, dtype: torch.dtype = torch.float32) -> Tensor:
    """The (B, K, S, E) keys or values that the codes stand for."""
    width = kept.codes.shape[3] * (2 if kept.bits == 4 else 1)
    codes = unpack_nibbles(kept.codes, width) if kept.bits == 4 else kept.codes
    grid = Grid("int8" if kept.bits == 8 else "int4", kept.group, True)
    if kept.along == "channel":
        return dequantize(codes, kept.scale, kept.zero, grid, dtype)
    turned = [part.transpose(2, 3) for part in (codes, kept.scale, kept.zero)]
    return dequantize(turned[0], turned[1], turned[2], grid, dtype).transpose(2, 3)
