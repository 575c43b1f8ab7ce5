"""Counters in shared memory: an int32 tensor that one process writes and others wait for.

There is no reference in Python: what Python writes, another process may see too early or too late.
Without the library there are no words, and ranks talk through Gloo.
"""

from __future__ import annotations

import torch

from lezero.ops.signal.native import NATIVE

SPIN_US = 20


def available() -> bool:
    """True where words work: on Linux, with a compiler (built once a machine)."""
    return NATIVE.available()


def read(words: torch.Tensor, index: int) -> int:
    """The value of a word, modulo 2^32. What its writer wrote before is visible afterwards."""
    return int(NATIVE.ops.read(words, index))


def write(words: torch.Tensor, index: int, value: int) -> None:
    """Sets a word to `value` modulo 2^32 and wakes who waits for it."""
    NATIVE.ops.write(words, index, value)


def wait(words: torch.Tensor, index: int, value: int, timeout_s: float) -> bool:
    """True when a word has reached `value` (counting modulo 2^32), False after `timeout_s`.

    Looks for `SPIN_US` microseconds, then sleeps in the kernel: another rank may need this core.
    """
    return bool(NATIVE.ops.wait(words, index, value, SPIN_US, int(timeout_s * 1e6)))


def reached(words: torch.Tensor, index: int, value: int) -> bool:
    """Whether a word has reached `value`, without waiting."""
    return (read(words, index) - value) & 0xFFFFFFFF < 1 << 31
