"""The heap of a step, replayed with the C library's own allocator."""

from __future__ import annotations

import sys

import pytest

from lezero.plan.heap import resident_bytes

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
