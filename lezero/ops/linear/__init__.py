"""Linear layers whose weight was packed for the processor: in bf16, int8 or int4.

    codes, scale, zero = quantize(weight, Grid("int4", group=64))
    packed = pack(codes, scale, zero, bits=4)
    y = linear_int(x, packed, bias, out_features=N, bits=4, group=64)              # W4A16
    y = linear_int(x, packed, bias, out_features=N, bits=4, group=64, x_bits=8)    # W4A8
    y = linear_int(x, packed, bias, out_features=N, bits=4, group=64, x_bits=8, x_block=32)

float8 weights lie as they are, codes (N, K) and scales (N, 1), and tokens become float8 too:

    codes, scale, _ = quantize(weight, Grid("fp8"))
    y = linear_fp8(x, codes, scale, bias)

Weights, scales and zero points are plain tensors: they lie in safetensors files as they are. The
ops take part in torch.compile and torch.export. `layout.py` says how weights lie in memory (on
accelerators `rows.py`), `reference.py` what is computed.
"""

from __future__ import annotations

from lezero.ops.linear.conv import conv_int8, lies_channels_last
from lezero.ops.linear.fp8 import linear_fp8
from lezero.ops.linear.layout import (
    Packed,
    from_rows,
    in_rows,
    pack,
    pack_bf16,
    settled,
    to_rows,
    unpack,
    unpack_bf16,
)
from lezero.ops.linear.native import available, kernel_name
from lezero.ops.linear.op import (
    embedding_int,
    embedding_rows,
    linear_bf16,
    linear_int,
    linear_rounded,
)

__all__ = [
    "Packed",
    "available",
    "conv_int8",
    "embedding_int",
    "embedding_rows",
    "from_rows",
    "in_rows",
    "kernel_name",
    "lies_channels_last",
    "linear_bf16",
    "linear_fp8",
    "linear_int",
    "linear_rounded",
    "pack",
    "pack_bf16",
    "settled",
    "to_rows",
    "unpack",
    "unpack_bf16",
]
