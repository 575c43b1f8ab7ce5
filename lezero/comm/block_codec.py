"""int8, int4, sign and 2:4: the codecs of `lezero.ops.codec`, by name.

| name | bits an element | decoded within |
|---|---|---|
| `int8:B` | 8 + 16/B | max / 252 |
| `int4:B` | 4 + 16/B | max / 13.8 |
| `sign:B` | 1 + 16/B | the distance of the magnitude to its block's mean |
| `2:4-bf16` | 9 | 1/256 of it, or 2⁻¹³⁴; two of each four become 0 |
| `2:4-int8:B` | 5 + 16/B | max / 252; two of each four become 0 |
| `2:4-int4:B` | 3 + 16/B | max / 13.8; two of each four become 0 |

max is the largest magnitude of the block. Payloads are laid out as `lezero.ops.codec.layout` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lezero.comm.codec import Codec, codecs
from lezero.core.errors import ConfigError
from lezero.ops import codec as op

_DEFAULT_BLOCK = {"int8": 256, "int4": 64, "sign": 256, "2:4-int8": 256, "2:4-int4": 64}
_FIXED_BLOCK = 256  # of 2:4-bf16, which has no scales: only how much a NaN takes with it
_LEVELS = {"int8": 127, "int4": 7, "2:4-int8": 127, "2:4-int4": 7}
_SCALE_UP = 1 + 2**-7  # a scale is rounded up to bf16


@codecs.register("int8")
@codecs.register("int4")
@codecs.register("sign")
@codecs.register("2:4-bf16")
@codecs.register("2:4-int8")
@codecs.register("2:4-int4")
class BlockCodec(Codec):
    """One form in blocks of `block` elements, each with a scale in bf16."""

    unbiased = False

    def __init__(self, form: str, block: int) -> None:
        self.form, self.block = form, block
        self.name = form if form == "2:4-bf16" else f"{form}:{block}"

    @classmethod
    def parse(cls, name: str, option: str) -> BlockCodec:
        if name == "2:4-bf16":
            if option:
                raise ConfigError(f"codec '{name}:{option}': allowed is '{name}', it has no blocks")
            return cls(name, _FIXED_BLOCK)
        if not option:
            return cls(name, _DEFAULT_BLOCK[name])
        if option not in map(str, op.BLOCKS):
            allowed = ", ".join(map(str, op.BLOCKS))
            raise ConfigError(f"codec '{name}:{option}': the block is one of {allowed} elements")
        return cls(name, int(option))

    def bytes(self, numel: int) -> int:
        return op.payload_bytes(self.form, numel, self.block)

    def encode(self, values: Tensor, payload: Tensor, error: Tensor | None = None) -> None:
        op.encode(values, payload, error, form=self.form, block=self.block)

    def decode(self, payload: Tensor, out: Tensor, add: bool = False) -> None:
        op.decode(payload, out, form=self.form, block=self.block, add=add)

    def bound(self, values: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(values.double().abs(), (0, -len(values) % self.block))
        size_KB = padded.view(-1, self.block)
        if self.form == "sign":
            count = size_KB.new_full((len(size_KB), 1), float(self.block))
            count[-1:] -= size_KB.numel() - len(values)
            mean_K1 = size_KB.sum(1, keepdim=True) / count
            bound_KB = (size_KB - mean_K1).abs() + mean_K1 * (2**-8 + 2**-16)
        elif self.form == "2:4-bf16":
            bound_KB = size_KB * 2**-8 + 2**-134
        else:
            top_K1 = size_KB.amax(1, keepdim=True) if len(size_KB) else size_KB[:, :1]
            levels = _LEVELS[self.form]
            bound_KB = (top_K1 / (2 * levels) * _SCALE_UP).expand_as(size_KB) * (1 + 2**-16)
            bound_KB = torch.where(top_K1 < levels * 2**-126, top_K1, bound_KB)
        if self.form.startswith("2:4"):
            second_G1 = size_KB.view(-1, 4).topk(2, 1).values[:, 1:]
            dropped = second_G1.expand(-1, 4).reshape(bound_KB.shape)
            bound_KB = torch.maximum(bound_KB, dropped)
        return bound_KB.flatten()[: len(values)]
