"""Words between processes: nothing is lost, nobody waits for ever, order is kept."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from lezero.comm import shared_memory
from lezero.core import groups
from lezero.ops import signal
from tests.ranks import RankPool

pytestmark = pytest.mark.skipif(not signal.available(), reason="no compiler, or not Linux")


def test_a_word_is_reached_counting_round() -> None:
    words = torch.zeros(4, dtype=torch.int32)
    assert signal.reached(words, 1, 0)
    assert not signal.reached(words, 1, 1)
    signal.write(words, 1, (1 << 32) - 2)
    assert signal.read(words, 1) == (1 << 32) - 2
    assert not signal.reached(words, 1, (1 << 32) + 3)
    signal.write(words, 1, (1 << 32) + 3)
    assert signal.read(words, 1) == 3
    assert signal.reached(words, 1, (1 << 32) - 2)
    assert signal.wait(words, 1, (1 << 32) + 2, 0.0)
    assert words.tolist() == [0, 3, 0, 0]


def test_a_wait_ends_in_time() -> None:
    words = torch.zeros(1, dtype=torch.int32)
    began = time.monotonic()
    assert not signal.wait(words, 0, 1, 0.05)
    assert 0.04 < time.monotonic() - began < 2


def test_a_sleeper_is_woken_and_python_goes_on_meanwhile() -> None:
    words = torch.zeros(1, dtype=torch.int32)
    writer = threading.Timer(0.1, signal.write, (words, 0, 1))
    writer.start()
    began = time.monotonic()
    assert signal.wait(words, 0, 1, 30.0)
    assert time.monotonic() - began < 5
    writer.join()


def ping_pong(rounds: int) -> int:
    """Each rank writes data, then its word; what it reads after the other's word is never stale."""
    rank = groups.rank()
    fd = shared_memory.create(4096)
    ends = groups.gather_objects([os.getpid(), fd])
    own = shared_memory.map_bytes(fd, 4096)
    other = shared_memory.open_other(*ends[1 - rank], 4096)
    mine, theirs = own.view(torch.int32), other.view(torch.int32)
    stale = 0
    for number in range(1, rounds + 1):
        mine[512:] = number
        signal.write(mine, 0, number)
        assert signal.wait(theirs, 0, number, 20.0)
        stale += int((theirs[512:] < number).any())
    groups.barrier()
    os.close(fd)
    return stale


def test_data_written_before_a_word_is_seen_after_it(ranks: RankPool) -> None:
    assert ranks(2, ping_pong, 3000) == [0, 0]
