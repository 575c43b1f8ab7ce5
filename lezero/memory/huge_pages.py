"""Tensors in huge pages: for weights that are read from one end to the other, again and again, and
for room that every step uses.

A processor fetches ahead within a page and looks each page up, so pages of 4 KiB slow reading from
memory down; with 2 MiB a token of a small model takes 5 to 10% less (docs/lab-notes.md, "Weights in
huge pages"). Linux gives them to private memory that asks, where its setting is `madvise` or
`always`; elsewhere nothing is moved.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from lezero.memory.pool import give_back_free_blocks

HUGE = 2 << 20
_SLAB = 32 << 20
_LINE = 64
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def given(setting: Path = SETTING) -> bool:
    """Whether this system gives huge pages to memory that asks for them."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in setting.read_text()
    except OSError:
        return False


class HugePages:
    """Room that grows by slabs of 32 MiB; only what tensors fill of a slab is taken from memory."""

    def __init__(self) -> None:
        self._given = given()
        self._left = torch.empty(0, dtype=torch.uint8, device="cpu")

    def move(self, tensors: Iterable[Tensor]) -> None:
        """Puts their data one behind the other into huge pages.

        A tensor stays the object that it is, with the same values, contiguous from now on, so
        whoever holds it sees the new place; views of it made before keep the old one. Tensors of
        accelerators, empty ones and those that there is no room for are left alone. The room is
        freed with the last tensor in it.
        """
        for x in tensors:
            if not self._given or x.device.type != "cpu" or not x.nbytes:
                continue
            try:
                place = self._place(x.nbytes).view(x.dtype).view(x.shape)
            except OSError:  # a limit leaves no room for two of it
                continue
            x.data = place.copy_(x.detach())

    def _place(self, size: int) -> Tensor:
        whole = -(-size // _LINE) * _LINE
        if whole > self._left.numel():
            give_back_free_blocks()  # of what was moved before
            self._left = _slab(max(whole, _SLAB))
        found, self._left = self._left[:size], self._left[whole:]
        return found


def huge_room(size: int) -> Tensor:
    """`size` bytes that nothing has been written to, uint8; on huge pages where the system gives
    them. Memory is taken as they are written, two MiB at a time."""
    with contextlib.suppress(OSError):  # too much; torch says so
        if given():
            return _slab(size)[:size]
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _slab(size: int) -> Tensor:
    """At least `size` bytes that begin with a huge page."""
    room = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(room, dtype=torch.uint8)
    return found[-found.data_ptr() % HUGE :]
