"""What is found and measured between ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from lezero.comm.mesh import Mesh
from lezero.comm.probe import Topology, probe
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
    topology = results[0][0]
    assert results[1][0] == topology
    assert topology.hosts.ranks == ((0, 1),)
    assert topology.level("network") is None
    loopback, memory = topology.level("loopback"), topology.level("memory")
    assert loopback is not None
    assert 1e-6 < loopback.latency_s < 0.1
    assert 1e7 < loopback.bytes_per_s < 1e11
    assert loopback.seconds(0) == loopback.latency_s
    if memory is not None:  # which is faster, a machine with other work does not show
        assert 1e7 < memory.bytes_per_s < 1e12
    print(topology.levels, results[0][1])
    assert results[0][1] < 5  # under a second on a machine that does nothing else


def test_each_line_of_a_mesh(ranks: RankPool) -> None:
    results = ranks(4, probed, {"replicate": 2, "shard": 2}, "replicate")
    assert all(topology == results[0][0] for topology, _ in results)
    assert results[0][0].hosts.ranks == ((0, 1),)


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
