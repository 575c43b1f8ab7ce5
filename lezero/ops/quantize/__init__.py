"""Values as codes of 4 or 8 bits with scales: groups of weights, and tokens of activations.

`Grid` says what codes mean, `quantize` finds them, `dequantize` goes back; `pack_nibbles` stores
4-bit codes two to a byte. `lezero.ops.linear` multiplies with them.
"""

from __future__ import annotations

from lezero.ops.quantize.blocks import (
    Quantized,
    dequantize,
    find_scale,
    nearest_points,
    quantize,
)
from lezero.ops.quantize.grid import FORMATS, Grid
from lezero.ops.quantize.nibbles import pack_nibbles, unpack_nibbles
from lezero.ops.quantize.tokens import fixed_point, quantize_blocks, quantize_tokens

__all__ = [
    "FORMATS",
    "Grid",
    "Quantized",
    "dequantize",
    "find_scale",
    "fixed_point",
    "nearest_points",
    "pack_nibbles",
    "quantize",
    "quantize_blocks",
    "quantize_tokens",
    "unpack_nibbles",
]
