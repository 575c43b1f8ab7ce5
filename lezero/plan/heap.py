"""Resident bytes of the C heap for a sequence of allocations and frees.

Live bytes are not resident bytes. torch asks glibc for blocks aligned to 64 bytes; what alignment
cuts off becomes slivers, small objects settle in them, and a freed block then neither joins its
neighbours nor fits a request of its own size (glibc, malloc/malloc.c, `_int_memalign`). Up to a
third of a step's memory goes that way where the host memory pool does not take tensors from malloc
(`memory/allocator.py`); some of it goes in any case. It is not guessed here: a child process makes
the very calls to the C library that the step will make, without touching the memory, and asks how
far the heap grew.

Note [Small objects]
A tensor brings small objects with it (tensor, storage, autograd node), and kernels make more.
Their sizes below were read from an allocation log of a transformer's step on torch 2.13. Which of
them settles where is chance, so the sequence is run with each of three mixes, and the mean counts.
The heap of the child begins with as many small holes as that of a process which has loaded torch
(`replay.HOLES`): in an empty one they would settle in the holes that large blocks need.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from lezero.plan.replay import run

FREE = -1
_TIMEOUT_S = 60
_WITHOUT_REPLAY = 1.15
"""Resident over live bytes where the heap cannot be replayed: the mean of what was measured."""


def resident_bytes(
    events: Sequence[tuple[int, int]],
    live: int,
    *,
    keep: bool,
    overhead: int | None = None,
    most: int | None = None,
) -> int:
    """Highest bytes that the heap takes from the kernel for `events` (block, bytes; -1 frees).

    live: highest bytes in use at once. keep: large blocks stay in the heap (host memory pool).
    overhead: bytes around a tensor in its block of malloc; None where torch aligns blocks.
    most: above this many live bytes nothing is replayed, a mean factor is used.
    """
    if sys.platform != "linux" or (most is not None and live > most):
        return int(live * _WITHOUT_REPLAY)
    # the script alone, without site packages: it starts in a few hundredths of a second
    command = [sys.executable, "-I", "-S", run.__code__.co_filename]
    body = json.dumps({"keep": keep, "overhead": overhead, "events": events})
    try:
        child = subprocess.run(
            command, input=body, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        peaks = json.loads(child.stdout)["peaks"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return int(live * _WITHOUT_REPLAY)
    return max(live, sum(peaks) // len(peaks))
