"""Rotary position embedding and its scalings.

Su et al., 2021, "RoFormer", equation 34: each pair of numbers in a head is turned by an angle
position × frequency. The pairs are (i, i + head_dim/2), as in the Hugging Face layout, and the
scalings are those that transformers defines for `rope_parameters`.

Shapes: B batch, T tokens, H heads, D width of a head, P = D/2 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from lezero.models.config import RopeScaling, TransformerConfig

_FIRST_TABLE = 2048


def frequencies(config: TransformerConfig, length: int = 0) -> tuple[Tensor, float]:
    """Angles a token in radians, `(P,)` fp32, and the factor on cos and sin (1 for most kinds).

    `length` is the number of tokens in the sequence; dynamic scaling and longrope look at it.
    """
    dim, base, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    if scaling is None:
        return _plain(base, dim), 1.0
    if scaling.kind == "linear":
        return _plain(base, dim) / scaling.factor, 1.0
    if scaling.kind == "dynamic":
        grown = scaling.factor * max(length, config.context) / config.context - scaling.factor + 1
        return _plain(base * grown ** (dim / (dim - 2)), dim), 1.0
    if scaling.kind == "llama3":
        return _llama3(_plain(base, dim), scaling), 1.0
    if scaling.kind == "longrope":
        divisors = scaling.long_factor if length > config.steady else scaling.short_factor
        divisor_P = torch.tensor(divisors, dtype=torch.float32, device="cpu")
        return _plain(base, dim, divisor_P), attention_factor(scaling)
    return _yarn(base, dim, scaling), attention_factor(scaling)


def _plain(base: float, dim: int, divisor_P: Tensor | float = 1.0) -> Tensor:
    index_P = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu")
    return 1.0 / (divisor_P * base ** (index_P / dim))


def _llama3(plain_P: Tensor, scaling: RopeScaling) -> Tensor:
    """Short wavelengths stay, long ones are divided by the factor, between them a blend."""
    context, low, high = scaling.original_context, scaling.low_freq_factor, scaling.high_freq_factor
    assert context is not None
    assert low is not None
    assert high is not None
    rotations_P = context / (2 * math.pi / plain_P)
    blend_P = ((rotations_P - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend_P) * plain_P / scaling.factor + blend_P * plain_P


def _yarn(base: float, dim: int, scaling: RopeScaling) -> Tensor:
    """YaRN, equations 17 to 19 ("NTK-by-parts"), with the ramp over the index of the pair."""
    context = scaling.original_context
    assert context is not None

    def pair_with(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(scaling.beta_fast or 32), pair_with(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp needs some width
    index_P = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    kept_P = 1 - ((index_P - low) / (high - low)).clamp(0.0, 1.0)
    plain_P = _plain(base, dim)
    return plain_P / scaling.factor * (1 - kept_P) + plain_P * kept_P


def attention_factor(scaling: RopeScaling) -> float:
    """What yarn (equation 22: 0.1 ln(s) + 1) and longrope multiply cos and sin by, unless the
    config says otherwise."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "longrope":
        assert scaling.original_context is not None
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + D/2) of every head. cos and sin broadcast against `(B, T, 1, P)`."""
    cos, sin = cos.to(x_BTHD.dtype), sin.to(x_BTHD.dtype)
    first, second = x_BTHD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Rope(nn.Module):
    """Tables of cos and sin by position, kept in fp32 whatever dtype the model is cast to.

    The tables are non-persistent buffers: they follow the model to a device and are never saved.
    Moving, casting or materialising a model computes them afresh. They start small and grow with
    the longest sequence seen, so a context of a million tokens costs nothing until it is used.
    """

    cos_TP: Tensor
    sin_TP: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("cos_TP", torch.empty(0), persistent=False)
        self.register_buffer("sin_TP", torch.empty(0), persistent=False)
        self._angles = config.angles(0)
        self._fill(min(config.longest, _FIRST_TABLE), self.cos_TP.device)

    def _fill(self, length: int, device: torch.device) -> None:
        if device.type == "meta":
            shape = (length, self.config.head_dim // 2)
            self.cos_TP = torch.empty(shape, dtype=torch.float32, device=device)
            self.sin_TP = torch.empty_like(self.cos_TP)
            return
        with torch.no_grad():
            angle_P, factor = frequencies(self.config, self._angles)
            angle_TP = torch.arange(length, dtype=torch.float32, device="cpu")[:, None] * angle_P
            # Not torch.cos: a model may be built before [Note: first calls that race] is heeded.
            turn_TP = torch.polar(torch.ones_like(angle_TP), angle_TP)
            self.cos_TP = (turn_TP.real * factor).contiguous().to(device)
            self.sin_TP = (turn_TP.imag * factor).contiguous().to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        result: Any = super()._apply(fn, recurse)
        self._fill(len(self.cos_TP), self.cos_TP.device)
        return result

    def reset_parameters(self) -> None:
        """Computes the tables on the device where they are, as after `to_empty`."""
        self._fill(len(self.cos_TP), self.cos_TP.device)

    def ready(self, length: int, device: torch.device) -> None:
        """Makes the tables those of a sequence of `length` tokens, on `device`."""
        angles = self.config.angles(length)
        if angles != self._angles or length > len(self.cos_TP):
            self._angles = angles
            doubled = max(_FIRST_TABLE, 1 << (length - 1).bit_length())
            self._fill(min(doubled, self.config.longest), device)
        elif self.cos_TP.device != device:
            self._fill(len(self.cos_TP), device)

    def slice(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the positions start to end, each `(T, 1, P)`."""
        return self.cos_TP[start:end, None], self.sin_TP[start:end, None]

    def gather(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of any positions (negative ones count as 0), each `(B, T, 1, P)`."""
        index_BT = positions_BT.clamp(min=0)
        return self.cos_TP[index_BT].unsqueeze(-2), self.sin_TP[index_BT].unsqueeze(-2)
