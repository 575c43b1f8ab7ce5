"""The host memory pool, each case in its own process because the setting is process-wide."""

import json
import subprocess
import sys
import textwrap

import pytest

from lezero.core.errors import ConfigError
from lezero.memory import HostPool


def run(code, **environment):
    import os

    text = textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


CODE = """
import json, resource, torch
from lezero.memory import HostPool
pool = HostPool(8 << 30, share={share})
on = pool.enable() if {enable} else False
def work():
    for _ in range(6):
        x = torch.ones(16 << 20); y = x + 1; del x, y
        pool.after_step()
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
kept = pool.stats().kept
pool.disable()
print(json.dumps(dict(on=on, faults=faults, kept=kept, after=pool.stats().kept)))
"""


def test_blocks_are_kept_and_steps_stop_faulting():
    off = run(CODE.format(enable=False, share=0.5))
    on = run(CODE.format(enable=True, share=0.5))
    assert on["on"]
    assert on["faults"] < off["faults"] / 10
    assert on["kept"] > 100 << 20


def test_what_is_kept_stays_within_the_bound():
    bounded = run(CODE.format(enable=True, share=0.005))
    assert bounded["kept"] < 100 << 20


def test_the_bound_counts_no_libraries_and_holds_in_late_steps_too():
    code = """
    import json, torch
    from lezero.memory import HostPool
    pool = HostPool(8 << 30, share=0.01)
    pool.enable()
    found = [pool.stats().kept]
    for _ in range(16):
        pool.after_step()
    x = torch.ones(64 << 20)
    del x
    for _ in range(8):
        found.append(pool.stats().kept)
        pool.after_step()
    print(json.dumps([*found, pool.stats().kept]))
    """
    first, *kept, last = run(code)
    assert first < 32 << 20
    assert min(kept) > 200 << 20
    assert last < 80 << 20


def test_the_flag_switches_it_off():
    off = run(CODE.format(enable=True, share=0.5), LEZERO_POOL="0")
    assert off["on"] is False


def test_what_is_no_heap_counts_as_no_kept_block(tmp_path):
    """A checkpoint's copy, a file that is mapped, and memory that ranks share."""
    code = """
    import json, mmap, numpy, torch
    from lezero.files import empty_bytes
    from lezero.memory import HostPool
    pool = HostPool(8 << 30)
    pool.enable()
    before = pool.stats().kept
    copy, _ = empty_bytes(64 << 20)
    copy.zero_()
    file = numpy.memmap({path!r}, mode="w+", shape=64 << 20)
    file[:] = 1
    shared = mmap.mmap(-1, 64 << 20)
    numpy.frombuffer(shared, numpy.uint8)[:] = 1
    held = pool.stats().kept - before
    del copy, _
    print(json.dumps([held, pool.stats().kept - before]))
    """
    held, after = run(code.format(path=str(tmp_path / "mapped")))
    assert abs(held) < 8 << 20
    assert abs(after) < 8 << 20


def test_the_last_pool_that_ends_switches_it_off():
    code = """
    import json, torch
    from lezero.memory import HostPool
    from lezero.plan import StepSpec
    from lezero.plan.measure import as_in_a_step
    def kept(pool):
        del_me = torch.ones(32 << 20)
        del del_me
        return pool.stats().kept > 100 << 20
    pool = HostPool(8 << 30)
    pool.enable()
    with as_in_a_step(StepSpec(batch=1, tokens=1)):
        pass
    found = [kept(pool)]
    pool.enable()
    pool.disable()
    print(json.dumps([*found, kept(pool)]))
    """
    assert run(code) == [True, False]


@pytest.mark.parametrize("share", [0, 1.5, "a", None, True, float("nan")])
def test_bad_share(share):
    with pytest.raises(ConfigError, match=f"share: got {share!r}, allowed is"):
        HostPool(1 << 30, share=share)


@pytest.mark.parametrize("limit", [-1, "1G", None, True])
def test_bad_limit(limit):
    with pytest.raises(ConfigError, match=f"memory_limit: got {limit!r}, allowed is"):
        HostPool(limit)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("heap", ["the first", "another"])
def test_what_is_freed_leaves_whichever_heap_it_lay_in(pool, heap):
    code = f"""
    import ctypes, json
    from lezero.memory import HostPool
    from lezero.memory.pool import frees_reach_the_kernel
    from lezero.profiler.memory import rss
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    if {heap == "another"}:
        assert libc.malloc(1 << 50) is None
    if {pool}:
        assert HostPool(8 << 30).enable()
    else:
        libc.free(libc.malloc(31 << 20))  # blocks come from a heap from now on
    at = libc.malloc(20 << 20)
    ctypes.memset(at, 1, 20 << 20)
    full = rss()
    with frees_reach_the_kernel():
        libc.free(at)
    print(json.dumps(full - rss()))
    """
    assert run(code) > 19 << 20
