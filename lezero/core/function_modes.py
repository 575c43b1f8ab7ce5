"""Calls of ours that no `TorchFunctionMode` sees.

Backward runs within the modes of the engine and of the user (attention that is redirected, a
default device), and each would be asked about each of the thousands of calls that hooks make for
the exchange of gradients: 2 to 3 µs a call, and tensors on a device that is not theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def past_modes(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, past every mode that is on where it is called."""

    @functools.wraps(function)
    def inner(*args: P.args, **keywords: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **keywords)

    return inner
