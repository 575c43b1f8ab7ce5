"""Calls that settle what torch's own first calls may get wrong.

[Note: first calls that race]
With MKL, the first call of a function like `exp` in a process, where two threads share it, may give
one thread's part with a relative error of some 1e-4: `exp` in 15 of 400 processes, `sin` in 16 of
400, `cos` in 3 and `log` in 2 of 150 (torch 2.13, two cores); second calls are right. A call for
one number, which one thread makes, settles it: none of 500 afterwards.
"""

from __future__ import annotations

import torch

_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "log"),
    *("log10", "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh"),
)


def settle_first_calls() -> None:
    """Makes the first calls, for one number each: some 0.1 ms."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in _FUNCTIONS:
            getattr(torch, name)(one)
