"""Sums of squares of many tensors, in fp64 and in a fixed order."""

from lezero.ops.square_sum.op import square_sums

__all__ = ["square_sums"]
