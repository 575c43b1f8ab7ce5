"""`square_sums`: the kernel of this machine where it fits, or the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lezero.core.errors import ConfigError
from lezero.ops.square_sum import reference
from lezero.ops.square_sum.native import NATIVE

_library = torch.library.Library("lezero", "FRAGMENT")
_library.define("square_sums(Tensor[] tensors) -> Tensor")


def square_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of each tensor, (len(tensors),) in fp64 on the host.

    Squares and sums are those of fp64, so that none of finite fp32 overflows; where there is NaN or
    an infinity, the sum is not finite. Added in one order: the same bits from every implementation,
    with any number of threads. Has no gradient. Raises `ConfigError` for what is not a floating
    type.
    """
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ConfigError(f"square_sums: got {tensor.dtype}, allowed are floating types")
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    found: torch.Tensor = torch.ops.lezero.square_sums([x.detach() for x in tensors])
    return found


def _run(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if not NATIVE.available() or not all(map(_fits, tensors)):
        return torch.tensor([reference.square_sum(x) for x in tensors], dtype=torch.float64)
    out = torch.empty(len(tensors), dtype=torch.float64)
    NATIVE.ops.square_sums([x.contiguous() for x in tensors], out)
    return out


def _fits(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


def _fake(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty(len(tensors), dtype=torch.float64)


_library.impl("square_sums", _run, "CompositeExplicitAutograd")
torch.library.register_fake("lezero::square_sums", _fake, lib=_library)
