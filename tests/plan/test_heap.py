"""The heap of a step, replayed with the C library's own allocator."""

from __future__ import annotations

import os
import random
import sys

import pytest

from lezero.memory import OVERHEAD
from lezero.plan.heap import FREE, resident_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
MIB = 1 << 20


def test_a_single_block_needs_its_bytes() -> None:
    found = resident_bytes([(0, 8 * MIB)], 8 * MIB, keep=True)
    assert 8 * MIB <= found < 8 * MIB + 256 * 1024


def test_a_freed_block_is_used_again() -> None:
    events = []
    for block in range(40):
        events += [(block, 8 * MIB), (block, -1)]
    # not at once: small objects that glibc keeps at hand hold the first few holes apart
    assert resident_bytes(events, 8 * MIB, keep=True) < 12 * 8 * MIB


def test_holes_between_blocks_count() -> None:
    # every second block is freed, and none of the holes holds what comes next
    events = [(block, 2 * MIB) for block in range(20)]
    events += [(block, -1) for block in range(0, 20, 2)]
    events += [(100, 10 * MIB)]
    live = 40 * MIB
    assert resident_bytes(events, live, keep=True) >= 50 * MIB


def test_without_the_pool_large_blocks_return_to_the_kernel() -> None:
    events = [(block, 40 * MIB) for block in range(4)] + [(block, -1) for block in range(4)]
    events += [(9, 41 * MIB)]
    assert resident_bytes(events, 160 * MIB, keep=False) < 162 * MIB


def test_what_is_larger_than_memory_is_not_replayed() -> None:
    assert resident_bytes([(0, 1 << 50)], 1 << 50, keep=True, most=1 << 40) > 1 << 50
    assert resident_bytes([(0, 1 << 60)], 1 << 60, keep=True) >= 1 << 60


def step(rng: random.Random) -> list[int]:
    """Sizes of what twelve layers keep for backward: large blocks and some small ones."""
    return [size for _ in range(72) for size in (rng.choice((1, 1, 2, 3)) * MIB, 100)]


def steps(count: int) -> tuple[list[tuple[int, int]], int]:
    """Events of steps that are all alike, and the most bytes that are alive in them."""
    events, block = [], 0
    sizes = step(random.Random(1))
    for _ in range(count):
        held = []
        for size in sizes:
            events += [(block, size), (block + 1, 2 * MIB), (block + 1, FREE)]
            held.append(block)
            block += 2
        for one in reversed(held):
            events += [(block, 3 * MIB), (one, FREE), (block, FREE)]
            block += 1
    return events, sum(sizes) + 3 * MIB


def test_with_tensors_from_malloc_the_heap_is_little_more_than_what_lives() -> None:
    events, live = steps(4)
    aligned = resident_bytes(events, live, keep=True)
    assert resident_bytes(events, live, keep=True, overhead=OVERHEAD) < 1.1 * live
    if tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[1].split("."))) < (2, 38):
        assert aligned > 1.1 * live  # later ones join what they cut off before an aligned block
