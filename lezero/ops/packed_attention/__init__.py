"""Attention within each of several texts that lie one after the other."""

from lezero.ops.packed_attention.op import packed_attention

__all__ = ["packed_attention"]
