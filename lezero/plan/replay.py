"""The child process of `plan/heap.py`: makes allocations through the C library, touches none.

Reads {"keep", "overhead", "events"} as JSON from stdin and prints {"peaks": [...]}, one figure a
mix of small objects. "overhead": bytes that a tensor's block of malloc is larger than the tensor,
or null where torch asks for aligned blocks. Uses the standard library alone, so that it starts
quickly; each mix runs in a fork.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST, TOP_PAD = 2**31 - 1, 64 << 20
ALIGNMENT = 64
SEPARATOR = 24
SMALL = 4096  # below this a tensor counts as small: no autograd node of its own

# (with every tensor, with every large tensor, made and freed at once), bytes each
MIXES = (
    ((16, 24, 96, 176), (488, 32, 312), (32,)),
    ((16, 24, 96, 176, 16, 24, 56, 32, 40), (488,), (32, 56, 768)),
    ((32, 48, 96, 176), (488, 48, 64, 40), ()),
)

HOLES = (
    *((size, 8) for size in range(24, 216, 16)),
    *((size, 24) for size in range(216, 536, 16)),
    *((8 << 10, 12), (16 << 10, 8), (28 << 10, 8), (60 << 10, 4), (128 << 10, 1)),
)
"""(bytes, how many) of the free blocks that `malloc_info` tells of in a process that has loaded
torch: 1.2 MB in 600 pieces, where small objects settle before they cut large holes."""


class MallInfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def make_holes(libc: ctypes.CDLL) -> None:
    """Leaves `HOLES` in the heap, with small blocks in between that stay."""
    free = []
    for size, count in HOLES:
        for _ in range(count):
            free.append(libc.malloc(size))
            libc.malloc(SEPARATOR)
    for block in free:
        libc.free(block)


def run(
    events: list[list[int]], keep: bool, overhead: int | None, mix: tuple[tuple[int, ...], ...]
) -> int:
    """Highest bytes of heap (its unused top apart) and of mapped blocks during `events`."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallInfo2
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    if keep:
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST)
        libc.mallopt(M_TRIM_THRESHOLD, LARGEST)
        libc.mallopt(M_TOP_PAD, TOP_PAD)
    always, large, passing = mix
    make_holes(libc)
    pointer = ctypes.c_void_p()
    held: dict[int, list[int]] = {}
    start, peak = libc.mallinfo2(), 0
    base = start.arena - start.keepcost + start.hblkhd
    for block, size in events:
        if size < 0:
            for address in held.pop(block):
                libc.free(address)
            continue
        if overhead is not None:
            pointer.value = libc.malloc(size + overhead)
        elif libc.posix_memalign(ctypes.byref(pointer), ALIGNMENT, max(size, 1)):
            pointer.value = None
        if not pointer.value:
            raise MemoryError
        small = (*always, *large) if size >= SMALL else always
        held[block] = [pointer.value, *(libc.malloc(n) for n in small)]
        for address in [libc.malloc(n) for n in passing]:
            libc.free(address)
        if size >= 1 << 18:
            info = libc.mallinfo2()
            peak = max(peak, info.arena - info.keepcost + info.hblkhd - base)
    return peak


def in_fork(*arguments: Any) -> int:
    """`run` on the untouched heap of a fork; -1 when it ran out of memory."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write, str(run(*arguments)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return int(text or -1)


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    given = asked["events"], asked["keep"], asked["overhead"]
    peaks = [in_fork(*given, mix) for mix in MIXES]
    if min(peaks) < 0:
        sys.exit(1)
    print(json.dumps({"peaks": peaks}))
