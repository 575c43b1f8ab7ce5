"""`ordered_sum`: checks its arguments, then the kernel of this machine or the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lezero.core.errors import ConfigError
from lezero.ops.ordered_sum import reference
from lezero.ops.ordered_sum.native import NATIVE

TYPES = (torch.float32, torch.bfloat16, torch.float64)


def ordered_sum(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Writes the sum of `parts` (n,), added in the order given in fp32, to `out` (n,).

    fp32 or bf16, also mixed; the result is rounded once, to nearest even. With fp64 among them, as
    exact comparisons need it, all is added in fp64, by the reference. `out` may be one of the
    parts. The same bits from every implementation, on every machine. Raises `ConfigError` for other
    types or lengths that differ.
    """
    if not parts:
        raise ConfigError("ordered_sum: nothing to add: `parts` is empty")
    native = True
    for tensor in (*parts, out):
        if tensor.dtype not in TYPES:
            raise ConfigError(
                f"ordered_sum: got {tensor.dtype}, allowed is float32, bfloat16 or float64"
            )
        if tensor.shape != out.shape or tensor.dim() != 1:
            raise ConfigError(
                f"ordered_sum: shapes differ: {tuple(tensor.shape)} and {tuple(out.shape)}; "
                "allowed are flat tensors of one length"
            )
        native = (
            native
            and tensor.dtype != torch.float64
            and tensor.device.type == "cpu"
            and tensor.is_contiguous()
        )
    if native and NATIVE.available():
        NATIVE.ops.ordered_sum(list(parts), out)
    else:
        reference.ordered_sum(parts, out)
