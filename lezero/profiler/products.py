"""How fast this processor multiplies in fp32 and in bf16, found in some hundredths of a second.

That it has instructions for bf16 says nothing of their speed: Intel's processors with AVX512-BF16
whose AMX a virtual machine hides multiply half as fast in bf16 as in fp32.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_SIZE, _ROUNDS = 256, 60
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def product_seconds() -> dict[str, float]:
    """Seconds of a product of two square matrices on the CPU, by "fp32" and "bf16", with the
    threads that torch has here; measured once in a process for each number of them."""
    return dict(_measured(torch.get_num_threads()))


@functools.cache
def _measured(threads: int) -> dict[str, float]:
    """In a thread of its own: the caller's may hold fake tensors, autocast or a default device."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_in_turns).result()


def _in_turns() -> dict[str, float]:
    """Both types in turns, many short products: the fastest of each is one that no other program
    has interrupted."""
    with torch.no_grad():
        square = torch.linspace(-1, 1, _SIZE * _SIZE, dtype=torch.float32, device="cpu")
        square = square.view(_SIZE, _SIZE)
        calls = {name: _product(square.to(dtype)) for name, dtype in _TYPES.items()}
        for call in calls.values():
            call()  # the first one makes the kernel
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(_ROUNDS):
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - began)
    return {name: min(each) for name, each in times.items()}


def _product(square: Tensor) -> Callable[[], Tensor]:
    out = torch.empty_like(square)
    return lambda: torch.mm(square, square, out=out)
