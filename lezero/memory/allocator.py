"""Where torch gets the host memory of tensors from.

Note [Aligned blocks]
torch asks glibc for blocks aligned to 64 bytes. Before 2.38 glibc cuts the piece before such a
block off and frees it by itself; small objects settle in it, and the block, once freed, seldom fits
a request of its own size again. The heap of a step grows to a quarter and more above what lives in
it, by chance, over many steps. `allocator.cpp` asks malloc for 72 bytes more and aligns by itself:
blocks fit again, and the heap is what lives. It is built on first use, in some seconds, once a
machine.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from lezero.core.log import logger

T = TypeVar("T")

OVERHEAD = 72
"""Bytes that a tensor's block is larger than its data: alignment, and where it began."""
_MOST_RECORDED = 4096


def can_come_from_malloc() -> bool:
    """Whether `tensors_from_malloc` works here; builds its library if need be.

    Without a compiler it does not: a line of the log says so. Nor with another malloc than glibc's
    (jemalloc by LD_PRELOAD, say) or another package's allocator of tensors in place: they stay. Nor
    on 64-bit Arm, where torch's own blocks may be mimalloc's.
    """
    library = _library()
    return library is not None and bool(library.lezero_tensors_can_come_from_malloc())


def tensors_from_malloc(on: bool) -> bool:
    """From now on, tensors on the CPU get their memory from malloc, or from torch's allocator.

    Holds for the whole process; tensors that exist stay as they are. False where it cannot be done
    (`can_come_from_malloc`).
    """
    library = _library()
    return library is not None and library.lezero_tensors_from_malloc(int(on)) >= 0


class Recorded(NamedTuple):
    """A block that was taken at `address`, or given back where `bytes` is -1."""

    address: int
    bytes: int


def recorded(run: Callable[[], T]) -> tuple[T, list[Recorded] | None]:
    """What `run` returns; and the blocks of tensors' host memory that it takes and gives back on
    this thread, in order, None where that cannot be told (`can_come_from_malloc`)."""
    library = _library()
    if library is None or library.lezero_record_begin() < 0:
        return run(), None
    numbers = (ctypes.c_int64 * _MOST_RECORDED)(), (ctypes.c_int64 * _MOST_RECORDED)()
    count = 0
    try:
        result = run()
    finally:
        count = library.lezero_record_end(_MOST_RECORDED, *numbers)
    if count > _MOST_RECORDED:
        return result, None
    return result, [
        Recorded(*pair) for pair in zip(*(each[:count] for each in numbers), strict=True)
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    from lezero.ops.build import BuildError, Source, build

    source = Path(__file__).with_suffix(".cpp")
    try:
        # It uses more of torch than the ABI that `build` asks for by itself.
        path = build("allocator", [Source(source, ("-UTORCH_TARGET_VERSION",))])
        library = ctypes.CDLL(str(path))
        library.lezero_record_end.restype = ctypes.c_int64
        return library
    except (BuildError, OSError) as error:
        logger("memory").warning("tensors' memory is torch's own, runs take more of it: %s", error)
        return None
