"""Pools of threads are let go, and made again."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHECK = """
import os
import time
import torch
from lezero.core.pools import release_pool

def threads():
    return len(os.listdir("/proc/self/task"))

def soon(count):  # a thread that has ended is in /proc for a moment more
    end = time.monotonic() + 10
    while threads() != count and time.monotonic() < end:
        time.sleep(0.001)
    return threads() == count

torch.set_num_threads(3)
a = torch.randn(600, 600)
for _ in range(2):
    before = threads()
    wanted = a.exp().sum()
    assert threads() >= before + 2, threads()
    release_pool()
    assert soon(before), threads()
assert torch.equal(a.exp().sum(), wanted)
print("let go")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
def test_a_pool_is_let_go_and_made_again() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    assert done.stdout.strip() == "let go", done.stderr
