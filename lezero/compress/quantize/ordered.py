"""A packed weight whose inputs lie in another order: GPTQ's `desc_act` ("act-order")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lezero.compress.quantize.weights import PackedWeight
from lezero.ops.quantize import Grid, Quantized


class OrderedWeight(PackedWeight):
    """A packed (N, K) weight whose column k belongs to input `order[k]`.

    GPTQ with act-order quantizes inputs by falling importance, so those that share a scale are no
    neighbours. Stored in that order they are, and the activations are gathered before the product.
    """

    order: Tensor

    def __init__(self, grid: Grid, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(grid, shape, dtype)
        self.register_buffer("order", torch.empty(self.full_shape[1], dtype=torch.int32))

    @classmethod
    def ordered(
        cls, made: Quantized, order: Tensor, grid: Grid, dtype: torch.dtype
    ) -> OrderedWeight:
        """`made`: codes (N, K) with scales (N, G), inputs already in `order` (K,)."""
        weight = cls.of(made, grid, dtype)
        assert isinstance(weight, OrderedWeight)
        weight.order = order.to(torch.int32)
        return weight

    def decoded_rows(self, count: int) -> Iterator[tuple[slice, Tensor]]:
        for own, found in super().decoded_rows(count):
            yield own, found[:, torch.argsort(self.order)]

    def decoded(self, dtype: torch.dtype | None = None) -> Tensor:
        found = super().decoded(dtype)
        return found[:, torch.argsort(self.order)]

    def linear(
        self, x: Tensor, bias: Tensor | None, x_bits: int, x_scale: Tensor | None, x_block: int = 0
    ) -> Tensor:
        self.check_inputs(x)
        return super().linear(x[..., self.order], bias, x_bits, x_scale, x_block)

    def rows(self, ids: Tensor) -> Tensor:
        return super().rows(ids)[..., torch.argsort(self.order)]
