"""The sum of several vectors in a fixed order, in fp32."""

from lezero.ops.ordered_sum.op import ordered_sum

__all__ = ["ordered_sum"]
