"""What Triton kernels share: products on the matrix units, and counters of programs."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lezero.core.device import stream

MOST_COUNTED = 1 << 16


def counts(device: torch.device) -> Tensor:
    """Of programs that have ended, for each part of a launch's result, `MOST_COUNTED` at most: the
    last one joins what the others left and sets its count to 0 again. For launches of this stream,
    one after another."""
    return _counts(device, stream(device))


@functools.cache
def _counts(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(MOST_COUNTED, dtype=torch.int32, device=device)


def try_out(place: torch.device) -> None:
    """Compiles and launches a kernel that does nothing of note; raises what stands in the way."""
    _one[(1,)](torch.empty(1, dtype=torch.int32, device=place))


@triton.jit
def _one(to):  # type: ignore[no-untyped-def]
    tl.store(to, 1)


@triton.jit
def times(a, b, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """a b in fp32. WIDE: in the interpreter, which does not multiply bf16."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)
