"""What Triton kernels share: a first try, and products on the matrix units."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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
