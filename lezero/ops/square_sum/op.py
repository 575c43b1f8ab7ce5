"""`square_sums`: the kernel of this machine where it fits, or torch's norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lezero.core.errors import ConfigError
from lezero.ops.square_sum.native import NATIVE

_library = torch.library.Library("lezero", "FRAGMENT")
_PIECE = 1 << 18
_library.define("square_sums(Tensor[] tensors) -> Tensor")


def square_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of each tensor, (len(tensors),) in fp64 on the host.

    Squares and sums are those of fp64, so that none of finite fp32 overflows; where there is NaN or
    an infinity, the sum is not finite. Of fp32 and bf16 on the CPU every kernel adds in one order,
    the reference's, so that bits depend neither on the processor nor on threads; other types, and
    all where there is no compiler, go by torch's norm. Has no gradient. Raises `ConfigError` for
    what is not a floating type.
    """
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ConfigError(f"square_sums: got {tensor.dtype}, allowed are floating types")
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    found: torch.Tensor = torch.ops.lezero.square_sums([x.detach() for x in tensors])
    return found


def _run(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    out = torch.zeros(len(tensors), dtype=torch.float64, device="cpu")
    able = NATIVE.available()
    fits = [i for i, x in enumerate(tensors) if able and _fits(x) and x.is_contiguous()]
    if fits:
        found = torch.empty(len(fits), dtype=torch.float64, device="cpu")
        NATIVE.ops.square_sums([tensors[i] for i in fits], found)
        out[fits] = found
    for i in set(range(len(tensors))).difference(fits):
        if able and _fits(tensors[i]):  # one copy at a time
            NATIVE.ops.square_sums([tensors[i].contiguous()], out[i : i + 1])
        else:
            out[i] = _by_norm(tensors[i])
    return out


def _by_norm(x: torch.Tensor) -> torch.Tensor:
    """By pieces: torch would first copy a large tensor to fp64."""
    pieces = x.reshape(-1).split(_PIECE)
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    return torch.stack(norms).square().sum()


def _fits(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


def _fake(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty(len(tensors), dtype=torch.float64, device="cpu")


_library.impl("square_sums", _run, "CompositeExplicitAutograd")
torch.library.register_fake("lezero::square_sums", _fake, lib=_library)
