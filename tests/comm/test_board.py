"""Where ranks listen for each other, and a healthy run whose datagrams do not arrive."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import zlib

import pytest
import torch
import torch.distributed as dist

from lezero.comm import board
from lezero.comm.watch import Watch
from lezero.core import groups
from tests.ranks import RankPool


def met_at(address: str) -> str:
    del os.environ["MASTER_ADDR"]
    where = f"tcp://{address}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    return board._master()[1]


def test_the_address_of_a_group_that_was_given_its_own(ranks: RankPool) -> None:
    assert ranks(1, met_at, "127.0.0.3") == ["127.0.0.3"]


def listening(machines: int) -> str:
    """Where this rank listens, when two ranks are said to be of so many machines."""
    name = f"machine {groups.rank() % machines}"
    board._machine = lambda: name
    watch = Watch.start()
    assert watch is not None
    return watch._board._inbox.getsockname()[0]


def test_ranks_of_one_machine_listen_there_only(ranks: RankPool) -> None:
    assert ranks(2, listening, 1) == ["127.0.0.1"] * 2
    assert ranks(2, listening, 2) == ["0.0.0.0"] * 2  # whatever the name of rank 0 stands for


def strangers() -> list[dict[str, str]]:
    """What arrives where others send too: without the token, with another one, or with garbage."""
    made = board.Board()
    port, own = made.addresses[1 - made.rank].port, made._token
    strange = zlib.compress(json.dumps([made.rank, {"told": "by a stranger"}]).encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        for body in (strange, bytes(len(own)) + strange, own, own + b"no message"):
            out.sendto(body, ("127.0.0.1", port))
    made.send({"told": "by a rank"})
    groups.barrier()
    found = [message for _, message in made.receive(1.0)]
    made.close()
    return found


def test_messages_without_the_token_of_the_job_are_ignored(ranks: RankPool) -> None:
    assert ranks(2, strangers) == [[{"told": "by a rank"}]] * 2


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="no waitid")
def test_a_process_is_stopped_or_gone_even_where_nobody_asked_for_its_status() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert board.process_state(process.pid) == "T"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert board.process_state(process.pid) == ""
    assert board.process_state(process.pid) == ""
    assert board.process_state(os.getpid()) not in ("", "T", "?")


def unreachable(how: str) -> str | None:
    """A slow rank and one that waits for it: no datagram arrives, the collectives do."""
    name = f"machine {groups.rank()}"
    board._machine = lambda: name
    if how == "dropped":
        board.Board.send = lambda self, message, to=None: None
    else:  # by a port where nobody listens
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed:
            closed.bind(("127.0.0.1", 0))
            where = closed.getsockname()
        connected = board.Board._connected

        def refused(self, rank, master):
            out = connected(self, rank, master)
            out.connect(where)
            return out

        board.Board._connected = refused
    watch = Watch.start(patience_s=1.0)
    assert watch is not None
    for _ in range(3):
        if groups.rank() == 1:
            time.sleep(1.2)
        groups.all_reduce_sum(torch.ones(4), "x")
    assert how == "dropped" or watch._board.gone
    return watch._told


@pytest.mark.parametrize("how", ["dropped", "refused"])
def test_a_run_goes_on_where_datagrams_do_not_arrive(ranks: RankPool, how: str) -> None:
    assert ranks(2, unreachable, how) == [None, None]
