"""Memory that the ranks of one host share: anonymous files, opened through /proc.

A rank makes a block (`memfd_create`: no name, no file system, not bounded by /dev/shm) and tells
the others its process id and file descriptor; they open `/proc/PID/fd/FD` and map the same pages.
The kernel frees a block with the last process that maps it, also after kill -9.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lezero.core.errors import DistributedError
from lezero.ops import signal


class Place(NamedTuple):
    """Where something lies: `offset` bytes into the block that rank `owner` knows as `fd`."""

    owner: int
    fd: int
    nbytes: int
    """Size of the whole block."""
    offset: int


@dataclass(frozen=True)
class Block:
    """A mapped block: `data` is all its bytes."""

    place: Place
    data: torch.Tensor


class SharedMemory:
    """The blocks that this rank made or opened. `pids`: process of each rank."""

    def __init__(self, rank: int, pids: list[int]) -> None:
        self.rank, self._pids = rank, pids
        self._mapped: dict[tuple[int, int], Block] = {}
        self._starts: list[int] = []
        self._blocks: list[Block] = []
        self._own: list[int] = []

    def pid(self, rank: int) -> int:
        return self._pids[rank]

    def make(self, nbytes: int) -> Block:
        """A new block of zeros. Pages are taken when they are first touched."""
        fd = create(nbytes)
        self._own.append(fd)
        return self._keep(Block(Place(self.rank, fd, nbytes, 0), map_bytes(fd, nbytes)))

    def open(self, place: Place) -> Block:
        """The block of another rank, mapped once; `DistributedError` when it cannot be opened."""
        found = self._mapped.get((place.owner, place.fd))
        if found is None:
            try:
                data = open_other(self._pids[place.owner], place.fd, place.nbytes)
            except OSError as error:
                raise DistributedError(
                    f"cannot open the shared memory of rank {place.owner} of this host, which "
                    f"died or has closed its link ({error})"
                ) from error
            found = self._keep(Block(place._replace(offset=0), data))
        return found

    def view(self, place: Place, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements at `place`."""
        data = self.open(place).data
        return data[place.offset : place.offset + numel * dtype.itemsize].view(dtype)

    def locate(self, tensor: torch.Tensor) -> Place | None:
        """Where `tensor` lies, if all of it is in one block."""
        begin = tensor.data_ptr()
        at = bisect_right(self._starts, begin) - 1
        if at < 0:
            return None
        block = self._blocks[at]
        offset = begin - self._starts[at]
        if offset + tensor.nbytes > block.place.nbytes:
            return None
        return block.place._replace(offset=offset)

    def close(self) -> None:
        """Unmaps what no tensor uses any more; the rest goes with its tensors."""
        for fd in self._own:
            os.close(fd)
        self._own.clear()
        self._blocks.clear()
        self._starts.clear()
        self._mapped.clear()

    def _keep(self, block: Block) -> Block:
        start = block.data.data_ptr()
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._blocks.insert(at, block)
        self._mapped[block.place.owner, block.place.fd] = block
        return block


def available() -> bool:
    """True where ranks can share memory: on Linux, with a compiler, where this Python (some are
    built for an older Linux) and this kernel let a process make memory and watch another."""
    if not signal.available():
        return False
    try:
        os.close(create(1))
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def create(nbytes: int) -> int:
    """A file descriptor of anonymous memory."""
    fd = os.memfd_create("lezero", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


def open_other(pid: int, fd: int, nbytes: int) -> torch.Tensor:
    """Maps what process `pid` knows as `fd`. Raises `OSError` where that is not allowed."""
    here = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return map_bytes(here, nbytes)
    finally:
        os.close(here)


def map_bytes(fd: int, nbytes: int) -> torch.Tensor:
    """The bytes of an open file as a tensor that writes through; unmapped with its last view."""
    pages = mmap.mmap(fd, nbytes)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
