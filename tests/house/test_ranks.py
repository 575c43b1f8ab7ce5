"""The warm rank pool itself: results in order, failures told with their rank, nothing left over."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lezero.core.errors import ConfigError
from tests.ranks import RankError, RankPool, _wait


def add_up(start: int, *, more: int = 0) -> tuple[int, float, int]:
    value = torch.tensor([float(start + more + dist.get_rank())])
    dist.all_reduce(value)
    return dist.get_rank(), value.item(), torch.get_num_threads()


def refuse_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ConfigError("no such thing")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("about to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def crash_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.abort()
    dist.barrier()


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def environment(name: str) -> str | None:
    return os.environ.get(name)


def not_sendable() -> object:
    return lambda: None


def test_results_come_in_rank_order(ranks: RankPool) -> None:
    assert ranks(2, add_up, 1, more=2) == [(0, 7.0, 1), (1, 7.0, 1)]


def test_four_ranks_start_fast_once_the_server_runs(ranks: RankPool) -> None:
    ranks(2, add_up, 0)
    starts = []
    for _ in range(3):
        assert [row[0] for row in ranks(4, add_up, 0)] == [0, 1, 2, 3]
        starts.append(ranks.last_start_s)
    print(f"four Gloo ranks start in {min(starts):.3f} s")
    assert min(starts) < 1.0


def test_threads_and_environment_reach_the_ranks(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEZERO_TEST_A", "outer")
    assert ranks(2, add_up, 0, threads=2)[0][2] == 2
    assert ranks(1, environment, "LEZERO_TEST_A") == ["outer"]
    assert ranks(1, environment, "LEZERO_TEST_A", env={"LEZERO_TEST_A": "inner"}) == ["inner"]
    assert ranks(1, environment, "CUDA_VISIBLE_DEVICES") == [""]


def test_an_exception_is_raised_here_with_its_rank(ranks: RankPool) -> None:
    with pytest.raises(ConfigError, match="no such thing") as caught:
        ranks(2, refuse_on, 1)
    assert "in rank 1 of 2" in caught.value.__notes__[0]


@pytest.mark.parametrize("told", [(0, 1), (1, 0), (1,), (0,)])
def test_the_rank_that_failed_first_is_the_cause_though_all_have_ended(
    told: tuple[int, ...], tmp_path: Path
) -> None:
    """One that told nothing was killed, and the others failed for it."""
    ended = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            os._exit(1)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        ended.append(pid)
    for when, rank in enumerate(told, start=1):
        (tmp_path / f"result-{rank}").write_text("")
        os.utime(tmp_path / f"result-{rank}", ns=(when, when))
    first = told[0] if len(told) == 2 else 1 - told[0]
    assert _wait(ended, 5, tmp_path) == (["ended with status 1"] * 2, first)


def test_a_killed_rank_is_named_with_what_it_printed(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 was killed by SIGKILL\nabout to die"):
        ranks(2, die_on, 1)


def test_a_crash_is_told_with_where_each_thread_was(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 was killed by SIGABRT\n") as caught:
        ranks(2, crash_on, 1)
    assert "in crash_on" in str(caught.value)


def test_a_hang_is_ended_in_time(ranks: RankPool) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 did not finish in 1 s"):
        ranks(2, sleep, 100.0, timeout_s=1)
    assert time.monotonic() - began < 10


def test_a_result_that_cannot_travel_is_said(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 0.*cannot send"):
        ranks(1, not_sendable)
