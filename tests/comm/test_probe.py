"""What is found and measured between ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from lezero.comm import topology
from lezero.comm.mesh import Mesh
from lezero.comm.probe import Topology, probe
from lezero.comm.watch import Watch
from lezero.core import groups
from tests.comm import network
from tests.ranks import RankPool


def probed(axes: dict[str, int], axis: str) -> tuple[Topology, float]:
    with Mesh(axes) as mesh:
        began = time.monotonic()
        found = probe(mesh, axis)
        return found, time.monotonic() - began


def test_ranks_of_one_host(ranks: RankPool) -> None:
    results = ranks(2, probed, {"shard": 2}, "shard")
    found = results[0][0]
    assert results[1][0] == found
    assert found.hosts.ranks == ((0, 1),)
    assert found.level("network") is None
    loopback, memory = found.level("loopback"), found.level("memory")
    assert loopback is not None
    assert 1e-6 < loopback.latency_s < 0.1
    assert 1e5 < loopback.bytes_per_s < 1e11  # 2.8 MB/s were seen beside other work
    assert loopback.seconds(0) == loopback.latency_s
    if memory is not None:  # which is faster, a machine with other work does not show
        assert 1e5 < memory.bytes_per_s < 1e12
    print(found.levels, results[0][1])
    assert results[0][1] < 5  # under a second on a machine that does nothing else


def test_each_line_of_a_mesh(ranks: RankPool) -> None:
    results = ranks(4, probed, {"replicate": 2, "shard": 2}, "replicate")
    assert all(found == results[0][0] for found, _ in results)
    assert results[0][0].hosts.ranks == ((0, 1),)


def probed_under_the_watch(times: int, hosts: list[list[int]]) -> list[list[str]]:
    """The levels that each of several probes of both axes found; `hosts`: the ranks of each."""
    machine = next(str(host) for host in hosts if groups.rank() in host)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "_machine", lambda: machine)
        with Mesh({"replicate": 2, "shard": 2}) as mesh:
            watch = Watch.start()
            assert watch is not None
            with watch:
                axes = ("replicate", "shard") * times
                return [sorted(level.name for level in probe(mesh, axis).levels) for axis in axes]


@pytest.mark.parametrize("hosts", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1, 2, 3]]], ids=str)
def test_lines_may_take_other_numbers_of_rounds(ranks: RankPool, hosts: list[list[int]]) -> None:
    """A line or a host that is slower has measured sooner: nobody has parted from anybody."""
    results = ranks(4, probed_under_the_watch, 2, hosts)
    assert all(found == results[0] for found in results)
    assert any("network" in names for names in results[0]) == (len(hosts) > 1)


def test_one_rank_has_nothing_to_measure() -> None:
    assert groups.world_size() == 1
    assert probe(Mesh({"shard": 1}), "shard").levels == ()


NO_INTERFACE = """
from lezero.core import groups
from lezero.core.errors import DistributedError
try:
    groups.join(backend="gloo")
except DistributedError as error:
    print(error)
"""


def joined(env: dict[str, str], *before: str) -> str:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519"}
    command = [*before, sys.executable, "-c", NO_INTERFACE]
    everything = {**os.environ, **ranks, **env}
    done = subprocess.run(command, env=everything, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def test_an_interface_that_is_not_there_is_told() -> None:
    assert "no network interface 'eth77' that is up; this machine has" in joined(
        {"GLOO_SOCKET_IFNAME": "eth77"}
    )


@pytest.mark.skipif(bool(network.missing()), reason=network.missing())
def test_no_interface_at_all_is_told() -> None:
    text = joined({}, "unshare", "--net")
    assert "no network interface is up, not even the loopback: this machine has lo (down)" in text
