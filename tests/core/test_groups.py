"""Joining, and documents between ranks: what is told when the others are not there."""

from __future__ import annotations

import os
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lezero as lz
from lezero.core import device, groups, launched, meeting
from lezero.core.errors import ConfigError, DistributedError, OrderError
from tests.ranks import RankPool


def join_a_stranger() -> str:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = str(stranger.getsockname()[1])
        os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        meeting.ANSWER_S = 0.5
        began = time.monotonic()
        with pytest.raises(DistributedError) as caught:
            groups.join(timeout_s=60)
        assert time.monotonic() - began < 30
    return str(caught.value)


def test_a_rank_whose_port_is_taken_by_a_stranger_does_not_wait_for_ever(ranks: RankPool) -> None:
    (text,) = ranks(1, join_a_stranger)
    assert "is not rank 0" in text
    assert "Check that the port is free" in text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"RANK": "2"}, "RANK=2, WORLD_SIZE=2: allowed is a rank from 0 to 1"),
        ({"RANK": "x"}, "RANK='x': allowed is a whole number"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE='-2': allowed is a whole number"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http': allowed is a whole number"),
        ({"MASTER_ADDR": ""}, "WORLD_SIZE=2 without MASTER_ADDR: this process would work alone"),
        ({"WORLD_SIZE": "", "RANK": "1"}, "RANK=1 without WORLD_SIZE: this process would work"),
        ({"WORLD_SIZE": "1", "RANK": "3"}, "RANK=3, WORLD_SIZE=1: allowed is a rank from 0 to 0"),
        ({"RANK": "", "MASTER_PORT": ""}, "WORLD_SIZE=2 without RANK and MASTER_PORT: .*lz launch"),
    ],
)
def test_a_place_that_cannot_be_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str], said: str
) -> None:
    right = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, value in {**right, **wrong}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=f"^{said}"):
        groups.join(timeout_s=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 processes"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, "mpirun started 2 processes"),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, ""),
        ({"OMPI_COMM_WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}, "mpirun started 8"),
        ({"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}, ""),
        ({"WORLD_SIZE": "2"}, ""),
        ({"WORLD_SIZE": "0", "RANK": "0"}, ""),
        ({"RANK": "0", "MASTER_ADDR": "localhost"}, ""),
    ],
)
def test_processes_that_know_nothing_of_each_other_are_told_once(
    monkeypatch, caplog, given: dict[str, str], said: str
) -> None:
    launched._tell_of_others.cache_clear()
    for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *launched._STARTERS.values()):
        monkeypatch.delenv(key, raising=False)
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    groups.join(timeout_s=1)
    groups.need_joined()
    assert not groups.active()
    assert [said in record.getMessage() for record in caplog.records] == ([True] if said else [])
    launched._tell_of_others.cache_clear()


def test_more_ranks_than_accelerators_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, value in {**place, "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    monkeypatch.setattr(device, "count", lambda: 1)
    with pytest.raises(ConfigError, match=r"2 ranks were started .* 1 cuda device, .* Start 1"):
        groups.join(timeout_s=1)


def left_alone() -> str:
    if groups.rank() == 1:
        return ""
    with pytest.raises(DistributedError) as caught:
        groups.gather_objects("a document")
    return str(caught.value)


def test_a_rank_that_left_is_told_of_where_documents_are_exchanged(ranks: RankPool) -> None:
    assert ranks(2, left_alone)[0] == "rank 0 lost contact with another rank, which died or left"


def patience() -> tuple[float, float]:
    made: Any = groups.make([[0, 1]])
    limit = made._get_backend(torch.device("cpu")).options._timeout
    return limit.total_seconds(), groups.joined_timeout_s()


def test_a_new_group_waits_as_long_as_the_ranks_said_when_they_joined(ranks: RankPool) -> None:
    assert ranks(2, patience, timeout_s=23) == [(23, 23), (23, 23)]
    assert groups.joined_timeout_s() == 600


def late_maker() -> float:
    made = dist.new_group
    late = groups.rank() == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", lambda *a: (made(*a), time.sleep(late))[0])
        began = time.monotonic()
        groups.make([[0, 1]])
    return time.monotonic() - began


def test_ranks_go_on_when_all_have_their_new_group(ranks: RankPool) -> None:
    assert min(ranks(2, late_maker)) > 0.7, "a rank that left earlier would end the other's wait"


def test_an_interface_that_was_just_switched_on_is_waited_for(monkeypatch) -> None:
    import psutil

    looks = iter([False, False, True])
    state = lambda up: SimpleNamespace(isup=up)  # noqa: E731
    found = lambda: {"lo": state(True), "eth5": state(next(looks))}  # noqa: E731
    monkeypatch.setattr(psutil, "net_if_stats", found)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth5")
    groups.need_interface()
    assert not list(looks), "three looks"
    monkeypatch.setattr(groups, "_CABLE_S", 0.1)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth5": state(False)})
    with pytest.raises(
        DistributedError, match=r"'eth5' that is up; this machine has eth5 \(down\)"
    ):
        groups.need_interface()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth6")
    monkeypatch.setattr(groups, "_CABLE_S", 100.0)
    with pytest.raises(DistributedError, match="'eth6'"):
        groups.need_interface()


@pytest.mark.parametrize(
    "begin",
    [
        lambda model: lz.Engine(model, lz.optim.AdamW(model), loss=lambda m, x: m(x).sum()),
        lambda model: lz.shard_(model, lz.Zero(stage=0)),
    ],
    ids=["Engine", "shard_"],
)
def test_a_rank_that_has_not_joined_is_told_before_it_trains_alone(monkeypatch, begin) -> None:
    """Rank 0 went on by itself, as if it were all of them."""
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, value in place.items():
        monkeypatch.setenv(key, value)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(OrderError, match=r"rank 1 of 2 and has not joined .*groups\.join"):
        begin(model)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE='two'"):
        begin(model)
    monkeypatch.setenv("WORLD_SIZE", "")  # as without a launcher
    assert not groups.launched()


@pytest.mark.parametrize(
    ("key", "ask"),
    [
        ("WORLD_SIZE", groups.launched),
        ("RANK", groups.rank),
        ("LOCAL_RANK", groups.local_rank),
        ("LOCAL_WORLD_SIZE", groups.ranks_here),
    ],
)
@pytest.mark.parametrize("given", ["2.0", "-2", "two"])
def test_a_place_that_is_no_number_is_told_by_whoever_asks(monkeypatch, key, ask, given) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**place, key: given}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{key}='{given}': allowed is a whole number from 0"):
        ask()
    launched._LOG.info("a line of the log asks for the rank too")


def test_no_local_rank(monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "-1")
    assert groups.local_rank() == 0
