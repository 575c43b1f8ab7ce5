"""Run by test_fp8_triton.py: tokens rounded by Triton equal the reference, on a GPU or interpreted;
on a GPU with units for float8 also the product, which is near it."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

from lezero.ops.linear import fp8, linear_fp8, reference, triton_fp8
from lezero.ops.quantize.tokens import fp8_tokens
from tests.ops.test_linear_fp8 import FLOATS, NEAR, coded, error, tokens

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
SHAPES = [(10, 1), (11, 16), (10, 33), (12, 1000), (10, 50_000), (0, 64), (3, 0)]
"""M, K."""
UNITS = 2.0**-9
"""Of sums in units that keep about 14 bits, as Hopper's (DeepSeek-V3, 2024, section 3.5.2)."""


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.float().nan_to_num(12345.0), other.float().nan_to_num(12345.0))


def convert(values: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
    """Triton's interpreter drops what rounding carries into the exponent; devices do not."""
    if target.name != "fp8e4nv":
        return plain(values, source, target, mode)
    wide = torch.from_numpy(values.astype(np.float32))
    return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


if __name__ == "__main__":
    plain, interpreter._convert_float = interpreter._convert_float, convert
    wrong = []
    for (M, K), dtype in itertools.product(SHAPES, FLOATS):
        x = tokens(M, K, dtype).to(DEVICE)
        for name, *pair in zip(
            ("codes", "scale"), triton_fp8.fp8_tokens(x), fp8_tokens(x), strict=True
        ):
            if pair[0].dtype != pair[1].dtype or not same(*pair):
                wrong.append(f"{name} of {M} × {K} {dtype}")
    for dtype in FLOATS if DEVICE != "cpu" else ():
        x = tokens(40, 96, dtype, 1024).to(DEVICE)
        codes, scale = (part.to(DEVICE) for part in coded(48, 96))
        print(f"{dtype}: units for float8: {fp8._multiplies_fp8(x.device, dtype)}")
        for bias in (None, torch.randn(48, device=DEVICE)):
            found = linear_fp8(x, codes, scale, bias)
            wanted = reference.linear_fp8(x, codes, scale, bias)
            away = error(found, wanted)
            if not away < max(2 * NEAR[dtype], UNITS):
                wrong.append(f"product in {dtype}, bias {bias is not None}: {away:g} away")
    print("\n".join(wrong[:20]))
    print(f"{len(wrong)} differences on {DEVICE}")
    sys.exit(bool(wrong))
