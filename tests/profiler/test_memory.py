"""Peak resident memory: exact where the kernel allows it, joined, nested, above a baseline."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from lezero.profiler import memory as module
from lezero.profiler.memory import (
    MemorySampler,
    SharedElsewhere,
    peak_rss,
    pss,
    reset_peak_rss,
    rss,
)

MIB = 2**20


def touch(mib: int) -> np.ndarray:
    """Fresh pages: malloc may hand out what other tests have freed and never gave back."""
    block = np.frombuffer(mmap.mmap(-1, mib * MIB), dtype=np.uint8)
    block[::4096] = 1
    return block


def test_a_short_peak_is_seen_and_the_baseline_is_not_counted() -> None:
    kept = touch(64)
    with MemorySampler(interval_s=10) as sampler:
        block = touch(100)
        del block
    assert sampler.exact
    assert 95 * MIB < sampler.above < 130 * MIB
    assert sampler.peak - sampler.baseline == sampler.above
    assert kept.size


def test_without_the_kernels_mark_the_thread_sees_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_reset", lambda: False)
    seen = threading.Event()
    with MemorySampler(interval_s=0.001, keep_samples=True) as sampler:
        block = touch(100)
        seen.wait(0.1)
        del block
    assert not sampler.exact
    assert 95 * MIB < sampler.above < 130 * MIB
    assert len(sampler.samples) > 5
    assert [at for at, _ in sampler.samples] == sorted(at for at, _ in sampler.samples)


def test_nested_samplers_do_not_take_each_others_peak() -> None:
    with MemorySampler(interval_s=10) as outer:
        block = touch(120)
        del block
        with MemorySampler(interval_s=10) as inner:
            block = touch(40)
            del block
        assert reset_peak_rss()
    assert outer.above > 110 * MIB
    assert 35 * MIB < inner.above < 80 * MIB


def test_the_thread_is_joined_also_after_an_error() -> None:
    before = threading.active_count()
    sampler = MemorySampler()
    with contextlib.suppress(ZeroDivisionError), sampler:
        assert threading.active_count() == before + 1
        raise ZeroDivisionError
    assert threading.active_count() == before
    with sampler, pytest.raises(RuntimeError, match="running already"):
        sampler.__enter__()


def test_a_given_baseline() -> None:
    with MemorySampler(baseline=1) as sampler:
        assert sampler.now() == pytest.approx(rss() - 1, abs=20 * MIB)
    assert sampler.above == sampler.peak - 1
    with MemorySampler(baseline=2**60) as sampler:
        pass
    assert sampler.above == 0, "never negative"


@pytest.mark.parametrize("interval", [0, -1, float("nan")])
def test_a_bad_interval_is_refused(interval: float) -> None:
    with pytest.raises(ValueError, match="interval_s"):
        MemorySampler(interval_s=interval)


def test_resident_and_proportional_bytes() -> None:
    assert 0 < pss() <= rss() + 32 * MIB
    assert peak_rss() >= rss() - 8 * MIB


def test_pages_of_files_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * (64 * MIB))
    before = rss(), pss()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        with MemorySampler(interval_s=0.001) as sampler:
            assert sum(data[:: mmap.PAGESIZE])
        taken = rss() - before[0], pss() - before[1]
    assert max(*taken, sampler.above) < 16 * MIB


def test_shared_pages_count_once_over_their_processes() -> None:
    block = mmap.mmap(-1, 32 * MIB)  # shared with a child that is forked
    block.write(b"x" * len(block))
    elsewhere = SharedElsewhere()
    before = elsewhere.bytes()
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        sum(block[:: mmap.PAGESIZE])
        os.write(ready[1], b".")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        found = SharedElsewhere().bytes() - before
    finally:
        os.write(go[1], b".")
        os.waitpid(child, 0)
        for end in (*ready, *go):
            os.close(end)
        block.close()
    assert abs(found - 16 * MIB) < 2 * MIB
