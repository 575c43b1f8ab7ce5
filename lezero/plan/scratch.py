"""Memory that the library of matrix products keeps for itself.

MKL, which torch's CPU builds carry, packs parts of its operands into blocks that it never gives
back: a new one for each call that needs a larger one than it has. Of most, 5 MiB a thread, it
writes a tenth; but scores of 32,000 tokens take 15 to 30 MiB, which lie between a step's tensors.
What a call needs is measured, by emptying MKL's store.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator, Mapping

import torch

from lezero.memory.pool import give_back_free_blocks
from lezero.profiler.memory import rss

_USUAL = 6 << 20
"""For each thread: kept for the products of a block of 192 to 1,024 features, and a part of what
`forecast` counts for libraries in any case."""


@functools.cache
def _mkl() -> ctypes.CDLL | None:
    """torch's library with MKL's own accounting, None where torch was built without MKL."""
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    try:
        library = ctypes.CDLL(os.path.join(folder, "libtorch_cpu.so"))
        library.mkl_serv_mem_stat.restype = ctypes.c_longlong
        library.mkl_serv_mem_stat.argtypes = (ctypes.c_void_p,)
        library.mkl_serv_free_buffers.restype = None
    except (OSError, AttributeError):
        return None
    return library


def drop_scratch() -> None:
    """Gives back what MKL keeps; for between calls."""
    if (library := _mkl()) is not None:
        library.mkl_serv_free_buffers()


def written_scratch() -> int:
    """Bytes that MKL keeps and has written to, which are dropped; 0 where they are as few as
    almost any call needs, or without MKL."""
    library, blocks = _mkl(), ctypes.c_int()
    most = _USUAL * torch.get_num_threads()
    if library is None or library.mkl_serv_mem_stat(ctypes.byref(blocks)) < most:
        return 0
    give_back_free_blocks()
    before = rss()
    library.mkl_serv_free_buffers()
    give_back_free_blocks()
    return max(0, before - rss())


def growth(needs: Mapping[str, int], first: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """(bytes, place) of what stays behind when calls are made in the order of `first`, which has
    the place of each by its key: some for each that needs more than all before it."""
    most = 0
    for key, place in first.items():
        if needs.get(key, 0) > most:
            most = needs[key]
            yield most, place


def kept_bytes(needs: Mapping[str, int], first: Mapping[str, int]) -> int:
    """All of `growth`."""
    return sum(size for size, _ in growth(needs, first))
