"""Calls of torch's own library that Python does not reach otherwise."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch


@functools.cache
def torch_library() -> ctypes.CDLL | None:
    """The library of the CPU's operations, None where this build of torch has none by that name."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
