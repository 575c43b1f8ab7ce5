"""Scaled-dot-product attention for training on the CPU, forward and backward, in bf16.

torch's kernel for the CPU runs far below the speed of the processor's bf16 unit and rounds the
gradients of keys and values once a block of queries. This op keeps every sum in fp32, skips the
masked half of causal attention tile by tile, and reads and writes strided heads without copies. The
kernel (C, AVX512-BF16) is built at first use; without a compiler or that instruction set, attention
stays torch's. `FastAttention` gives it to any model; see `mode.py`.
"""

from __future__ import annotations

from lezero.ops.attention.mode import FastAttention, scaled_dot_product_attention
from lezero.ops.attention.native import available, kernel_name
from lezero.ops.attention.op import attention

__all__ = [
    "FastAttention",
    "attention",
    "available",
    "kernel_name",
    "scaled_dot_product_attention",
]
