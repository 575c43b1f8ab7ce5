"""Products on an accelerator's matrix units, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def times(a, b, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """a b in fp32. WIDE: in the interpreter, which does not multiply bf16."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)
