"""Inputs that the kernels' 16 bits do not hold as well as bf16 would: layers are warned about by
name.

Int8 and int4 weights are multiplied with inputs in fixed point (`lezero.ops.quantize.tokens`): 16
bits and a scale for each block of up to 128 inputs, so an error of up to 1.6e-5 of the block's
largest. bf16 keeps eight bits of every value by itself. Beside a massive activation, more than
some 200 times as large as its neighbours, these lose more in fixed point; it matters where the
massive one has little weight. The cost is measured on the first calibration batch, for the tokens
where it can be:

    c = sqrt(mean over tokens of ‖y' - y‖² / ‖y‖²)

with y the product of the decoded weight with the inputs, and y' with the inputs in fixed point or
in bf16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lezero.compress.quantize.input_rounding import token_error
from lezero.compress.quantize.modules import QuantizedLayer, QuantizedLinear
from lezero.compress.quantize.parts import at_once
from lezero.compress.quantize.report import named
from lezero.compress.quantize.weights import PackedWeight
from lezero.ops.linear.reference import block_of
from lezero.ops.quantize import fixed_point
from lezero.report.units import percent

_MASSIVE = 200.0  # times its neighbours: there both roundings cost about the same
_CLEARLY = 2.0
_TOKENS = 256


class Outliers:
    """Looks at layers as they are quantized, and says which of them lose by fixed point."""

    def __init__(self) -> None:
        self._costs: dict[str, tuple[float, float]] = {}

    @torch.no_grad()
    def look(self, name: str, layer: QuantizedLayer, x: Tensor) -> None:
        """Measures one layer on its input (…, K)."""
        weight = layer.weight
        if not isinstance(layer, QuantizedLinear) or not isinstance(weight, PackedWeight):
            return
        if layer.x_bits != 16:
            return
        size = block_of(weight.group)
        x_MK = _with_outliers(x.reshape(-1, x.shape[-1]), size)
        if not len(x_MK):
            return
        codes, scale = fixed_point(x_MK, size)
        fixed = (codes.unflatten(1, (-1, size)).float() * scale[..., None]).flatten(1)
        rows = max(1, at_once(x_MK.device) // x_MK.shape[1])
        inputs = (x_MK, fixed[:, : x_MK.shape[1]], x_MK.bfloat16().float())
        parts = [[F.linear(x, w) for x in inputs] for _, w in weight.decoded_rows(rows)]
        exact, *others = (torch.cat(some, 1) for some in zip(*parts, strict=True))
        cost, usual = (token_error(exact, found) for found in others)
        if cost > _CLEARLY * max(usual, 2.0**-9):
            self._costs[name] = (cost, usual)

    def notes(self) -> list[str]:
        """A note where there is something to say."""
        if not self._costs:
            return []
        worst = max(self._costs, key=lambda name: self._costs[name][0])
        cost, usual = self._costs[worst]
        return [
            f"inputs of {named([*self._costs])} hold values so much larger than those beside them "
            "that 16 bits of fixed point, as int8 and int4 weights are multiplied, lose more than "
            f"bf16 would: outputs of such tokens of '{worst}' change by {percent(cost)}, in bf16 "
            f"by {percent(usual)}. Where that is too much, leave them out with filter=, or take "
            "lz.Fp8() or lz.Nf4() for them"
        ]


def _with_outliers(x_MK: Tensor, size: int) -> Tensor:
    """Tokens in fp32 that hold a value far larger than the others of its block, the worst of
    them."""
    blocks = F.pad(x_MK.float(), (0, -x_MK.shape[1] % size)).unflatten(1, (-1, size)).abs()
    most, at = blocks.max(-1, keepdim=True)
    rest = blocks.scatter(-1, at, 0.0).square().sum(-1).div(size - 1).sqrt()
    # A block of one value loses nothing.
    ratio_M = torch.where(rest > 0, most[..., 0] / rest, 0.0).amax(1)
    worst = ratio_M.topk(min(_TOKENS, len(ratio_M))).indices
    return x_MK[worst[ratio_M[worst] > _MASSIVE]].float()
