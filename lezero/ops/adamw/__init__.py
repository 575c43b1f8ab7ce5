"""AdamW in one pass over memory: bf16 weights with lossless masters, moments in fp32 or 8 bits.

`torch.ops.lezero.adamw_` and `torch.ops.lezero.adamw8bit_` update one parameter in place; the
optimizers of `lezero.optim` call them.
"""

from lezero.ops.adamw import eight_bit, masters, op, reference
from lezero.ops.adamw.native import NATIVE

__all__ = ["NATIVE", "eight_bit", "masters", "op", "reference"]
