"""Memory that the library of matrix products keeps for itself.

MKL, which torch's CPU builds carry, packs parts of its operands into blocks that it never gives
back: a new one for each call that needs a larger one than it has. Of most, 5 MiB a thread, it
writes a tenth; but scores of 32,000 tokens take 15 to 30 MiB, which lie between a step's tensors.
What a call needs is measured, by emptying MKL's store.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping

import torch

from lezero.core.torch_cpu import torch_library
from lezero.memory.pool import frees_reach_the_kernel, give_back_free_blocks
from lezero.profiler.memory import rss

_USUAL = 6 << 20
"""For each thread: kept for the products of a block of 192 to 1,024 features, and a part of what
`forecast` counts for libraries in any case."""
_READINGS = 5
_AGREE = 0.05


@functools.cache
def _mkl() -> ctypes.CDLL | None:
    """torch's library with MKL's own accounting, None where torch was built without MKL."""
    library = torch_library()
    if library is None:
        return None
    try:
        library.mkl_serv_mem_stat.restype = ctypes.c_longlong
        library.mkl_serv_mem_stat.argtypes = (ctypes.c_void_p,)
        library.mkl_serv_free_buffers.restype = None
    except AttributeError:
        return None
    return library


def scratch_of(run: Callable[[], object]) -> int:
    """Bytes that MKL takes for `run`, writes to and keeps; 0 where they are as few as almost any
    call needs, or without MKL. `run` is called at least once, and what is kept is dropped.

    They are seen as what the process no longer has once they are dropped, and other threads
    allocate meanwhile: two readings must agree, or the middle one of five counts.
    """
    found: list[int] = []
    while len(found) < _READINGS:
        if (size := _reading(run)) is None:
            return 0
        if any(abs(size - other) <= _AGREE * other for other in found):
            return size
        found.append(size)
    return sorted(found)[_READINGS // 2]


def _reading(run: Callable[[], object]) -> int | None:
    library, blocks = _mkl(), ctypes.c_int()
    if library is None:
        run()
        return None
    library.mkl_serv_free_buffers()
    run()
    if library.mkl_serv_mem_stat(ctypes.byref(blocks)) < _USUAL * torch.get_num_threads():
        return None
    give_back_free_blocks()
    before = rss()
    with frees_reach_the_kernel():
        library.mkl_serv_free_buffers()
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
