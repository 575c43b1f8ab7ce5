"""The weights of one decoder layer as kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lezero.ops.linear.checks import check_packed
from lezero.ops.linear.layout import Packed

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Weight:
    """A packed matrix: `bits` 16 (`pack_bf16`), 8 or 4 (`pack`); bias fp32 (N,) or None.

    group, x_bits and x_block: as `linear_int` takes them; nothing to a matrix of 16 bits.
    """

    packed: Packed
    bias: Tensor | None
    out_features: int
    in_features: int
    bits: int
    group: int = 0
    x_bits: int = 16
    x_block: int = 0

    def check(self, what: str) -> None:
        """Raises `ConfigError` where the tensors are not such a matrix."""
        if self.bits != 16:
            N, K = self.out_features, self.in_features
            check_packed(what, self.packed, K, N, self.bits, self.group)

    def row(self) -> list[int]:
        """What `lezero_weight` holds."""
        weight, scale, zero = self.packed
        addresses = [_address(x) for x in (weight, scale, zero, self.bias)]
        kind = 0 if self.bits == 16 else _KINDS[scale.dtype]
        return [*addresses, self.bits, self.group, self.x_bits, self.x_block, kind]


@dataclass(frozen=True)
class LayerWeights:
    """norm1, norm2: fp32 (D,); q_norm, k_norm: fp32 (E,) or None.

    qkv: ((H + 2 K) E, D), the queries first; out: (D, H E); gate_up: (2 F, D), the gates first;
    down: (D, F).
    """

    norm1: Tensor
    qkv: Weight
    out: Weight
    norm2: Tensor
    gate_up: Weight
    down: Weight
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    def row(self) -> list[int]:
        """What `lezero_layer` holds."""
        found = [n for w in (self.qkv, self.out, self.gate_up, self.down) for n in w.row()]
        norms = (self.norm1, self.norm2, self.q_norm, self.k_norm)
        return [*found, *(_address(x) for x in norms)]


@dataclass(frozen=True)
class Ending:
    """What logits are made of: norm, fp32 (D,), of the last states, and the head, (V, D)."""

    norm: Tensor
    head: Weight

    def row(self) -> list[int]:
        """The head as `lezero_weight` holds it, then the norm."""
        return [*self.head.row(), _address(self.norm)]


@dataclass(frozen=True)
class Beginning:
    """Where the residual stream begins: an embedding of 8 or 4 bits, (V, D), and the type that its
    numbers are rounded to, fp32 or bf16."""

    rows: Weight
    dtype: torch.dtype


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
