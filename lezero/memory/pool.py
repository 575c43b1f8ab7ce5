"""Host memory pool: large blocks stay with the process between steps.

glibc gives every large block back to the kernel as soon as it is freed, so each training step pays
for page faults and zeroing again. `HostPool` tells the allocator to keep them (`mallopt` at run
time) and asks the kernel for huge pages over the heap where `madvise` is allowed. What is kept
stays within a share of the memory that this process may use: above it, free blocks are given back.

A kept block serves again only where it still fits: while the pool is on, tensors get their memory
as Note [Aligned blocks] in `allocator.py` tells.

The setting belongs to the whole process, not to one model: it ends with the last pool that is
disabled. It costs resident memory (the peak of a
step stays resident between steps; the forecast counts it) and never changes a computed value.
`LEZERO_POOL=0` or `pool: false` switches it off. Without glibc it does nothing.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lezero.core.errors import ConfigError
from lezero.core.flags import flag
from lezero.files import mapped_bytes
from lezero.memory.allocator import tensors_from_malloc

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 2**31 - 1  # mallopt takes an int: blocks above 2 GiB still go straight to the kernel
_KEEPING = (_LARGEST, _LARGEST, 64 << 20)
_USUAL = (32 << 20, 64 << 20, 128 << 10)
"""Thresholds (mmap, trim) and pad that glibc moves to by itself once a block of 32 MiB was freed;
a process that sets one of them keeps the others where they are, and there is no way to ask."""
_MADV_HUGEPAGE = 14
_HUGE = 2 << 20
_enabled = 0  # pools of this process that are on
_switching = threading.RLock()  # the collector may end an engine's pool while another one begins


class _MallInfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """glibc with the calls that the pool needs, or None on another C library."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.gnu_get_libc_version  # noqa: B018  (only glibc has it)
        libc.mallinfo2.restype = _MallInfo2
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        return libc
    except (OSError, AttributeError):
        return None


def give_back_free_blocks() -> None:
    """Returns what is free on the C heap to the kernel, once; for after large frees."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


@contextmanager
def blocks_kept() -> Iterator[None]:
    """Freed blocks stay with the process meanwhile, for work that takes blocks of the same sizes
    again and again; afterwards they are given back."""
    pool = HostPool(0)
    pool.enable()
    try:
        yield
    finally:
        pool.disable()


@contextmanager
def frees_reach_the_kernel() -> Iterator[None]:
    """What is freed meanwhile has left the process afterwards, whichever heap it lay in.

    `give_back_free_blocks` leaves the end of every heap but the first: those of threads, and of a
    main thread that was once refused memory, which glibc then sends to another heap for good.
    """
    libc = _libc()
    if libc is None:
        yield
        return
    libc.mallopt(_M_TRIM_THRESHOLD, 128 << 10)
    libc.mallopt(_M_TOP_PAD, 0)
    try:
        yield
    finally:
        libc.malloc_trim(0)
        _set(libc, *(_KEEPING if _enabled else _USUAL))


def _set(libc: ctypes.CDLL, mapped: int, trim: int, pad: int) -> bool:
    return bool(
        libc.mallopt(_M_MMAP_THRESHOLD, mapped)
        and libc.mallopt(_M_TRIM_THRESHOLD, trim)
        and libc.mallopt(_M_TOP_PAD, pad)
    )


@dataclass(frozen=True)
class PoolStats:
    """Bytes that the C heap holds: in use by tensors and others, and free but still resident."""

    in_use: int
    kept: int


class HostPool:
    """Keeps freed host blocks for reuse, up to `share` of `memory_limit` bytes, which are those
    that this process may use: ranks on one machine share its memory.

    Call `after_step()` once a training step: it extends huge pages over a grown heap and gives free
    blocks back when more than the bound is kept.
    """

    def __init__(self, memory_limit: int, share: float = 0.25) -> None:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"pool share: got {share!r}, allowed is above 0 and at most 1")
        if type(memory_limit) is not int or memory_limit < 0:
            allowed = "allowed is a whole number of bytes, as 8 << 30"
            raise ConfigError(f"pool memory_limit: got {memory_limit!r}, {allowed}")
        self.bound = int(memory_limit * share)
        self.enabled = False
        self.huge_pages = False
        self._heap_end = 0
        self._steps = 0
        self._other = 0  # resident bytes that are not the heap's: libraries, stacks

    def enable(self) -> bool:
        """Starts keeping blocks; False where the flag, the platform or the C library forbids it."""
        global _enabled
        libc = _libc()
        if libc is None or not flag("LEZERO_POOL"):
            return False
        if self.enabled:
            return True
        with _switching:
            self._other = max(0, _resident() - _in_use(libc))
            _enabled += 1  # first, so that no other pool that ends meanwhile is the last
            self.enabled = _set(libc, *_KEEPING)
            if self.enabled:
                tensors_from_malloc(True)
            else:
                _enabled -= 1
        return self.enabled

    def disable(self) -> None:
        """Back to where glibc's own thresholds come to lie, unless another pool is on; free blocks
        return to the kernel."""
        global _enabled
        libc = _libc()
        with _switching:
            if libc is None or not self.enabled:
                return
            self.enabled = False
            _enabled -= 1
            if _enabled:
                return
            _set(libc, *_USUAL)
            tensors_from_malloc(False)
        libc.malloc_trim(0)

    def after_step(self) -> None:
        """Keeps the pool within its bound; about 20 µs, later every eighth step only."""
        self._steps += 1
        if not self.enabled or (self._steps > 16 and self._steps % 8):
            return
        self._advise_huge()
        if self.stats().kept > self.bound:
            libc = _libc()
            assert libc is not None
            libc.malloc_trim(0)

    def stats(self) -> PoolStats:
        libc = _libc()
        if libc is None:
            return PoolStats(0, 0)
        in_use = _in_use(libc)
        return PoolStats(in_use, max(0, _resident() - self._other - in_use))

    def _advise_huge(self) -> None:
        """Asks for huge pages over the part of the heap that is new since the last call."""
        libc = _libc()
        start, end = heap_range()
        if libc is None or end - max(start, self._heap_end) < _HUGE:
            return
        begin = (max(start, self._heap_end) + _HUGE - 1) // _HUGE * _HUGE
        size = (end - begin) // _HUGE * _HUGE
        if size > 0:
            self.huge_pages = libc.madvise(begin, size, _MADV_HUGEPAGE) == 0
        self._heap_end = begin + max(size, 0)


def _in_use(libc: ctypes.CDLL) -> int:
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def _resident() -> int:
    """Resident bytes of this process that may be the heap's: no files, no shared memory, no copies
    of checkpoints. Free blocks that were given back count as free in malloc's own books for ever,
    so only the kernel knows what is really kept."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            resident, shared = map(int, file.read().split()[1:3])
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE") - mapped_bytes()
    except (OSError, ValueError, IndexError):
        return 0


def heap_range() -> tuple[int, int]:
    """Start and end address of the C heap; (0, 0) where it cannot be read."""
    try:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
            spans = [line.split(maxsplit=1)[0] for line in maps if line.rstrip().endswith("[heap]")]
    except OSError:
        return 0, 0
    if not spans:
        return 0, 0
    return int(spans[0].split("-")[0], 16), int(spans[-1].split("-")[1], 16)
