"""Run by test_linear_triton.py: Triton kernels against the reference, on a GPU or interpreted."""

from __future__ import annotations

import itertools
import sys

import torch

from lezero.ops.linear import Packed, reference, triton_kernel
from tests.ops.test_linear import packed, seeded

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
SHAPES = [(1, 40, 96), (3, 33, 70), (16, 16, 64), (17, 5, 129)]
"""M, N, K."""


def moved(weight: Packed) -> Packed:
    return Packed(*(x if x is None else x.to(DEVICE) for x in weight))  # type: ignore[arg-type]


def worst(M: int, N: int, K: int, bits: int, group: int, zero: bool, dtype: torch.dtype) -> float:
    """The largest difference, relative to the largest value."""
    weight = moved(packed(N, K, bits, group, zero, dtype))
    x, bias = seeded(M, K).to(dtype).to(DEVICE), seeded(N).to(DEVICE) if zero else None
    found = triton_kernel.linear_int(x, weight, bias, N, bits, group)
    wanted = reference.linear_int(x, weight, bias, None, N, bits, group, 16)
    return float((found - wanted).abs().max() / wanted.abs().max())


if __name__ == "__main__":
    wrong = []
    types = (torch.float32, torch.float16)
    kinds = itertools.product(SHAPES, (4, 8), (0, 32, 64), (False, True), types)
    for shape, bits, group, zero, dtype in kinds:
        difference = worst(*shape, bits, group, zero, dtype)
        if not difference < (1e-4 if dtype == torch.float32 else 2e-3):
            wrong.append(f"{shape} {bits} {group} {zero} {dtype}: {difference:g}")
    x = seeded(2, 96).to(DEVICE)
    x[1, 5] = float("nan")
    weight = moved(packed(40, 96, 4, 32, False, torch.float32))
    spoiled = triton_kernel.linear_int(x, weight, None, 40, 4, 32)
    if not (spoiled[1].isnan().all() and spoiled[0].isfinite().all()):
        wrong.append("a NaN did not stay in its token")
    print("\n".join(wrong[:20]))
    print(f"{len(wrong)} differences on {DEVICE}")
    sys.exit(bool(wrong))
