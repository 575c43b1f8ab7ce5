"""Latency and bandwidth between ranks, by a short measurement: the α and β of T(n) = α + n / β.

    topology = probe(mesh, "shard")              # every rank together; under a second
    topology.hosts.ranks                         # ((0, 1), (2, 3))
    topology.level("network").seconds(1 << 20)   # how long a host takes to send a MiB

Three levels, each measured with what the wires use: "memory" (ranks of a host, shared memory),
"loopback" (the same ranks, sockets) and "network" (between hosts, sockets; NCCL for accelerators
counts as network). The slowest line of the mesh and the slowest rank count, medians over time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from lezero.comm import shared_memory
from lezero.comm.account import Account
from lezero.comm.buffers import Buffers
from lezero.comm.flat import Flat
from lezero.comm.mesh import Mesh
from lezero.comm.pending import Call, Queue
from lezero.comm.route import Route
from lezero.comm.shared import Shared
from lezero.comm.topology import Hosts, find_hosts
from lezero.core import device, groups, observer

_FIRST, _LARGEST = 1 << 16, 1 << 25
_LONG_S = 0.01  # a transfer that takes so long tells the bandwidth
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Level:
    """`latency_s`: seconds of an exchange of nothing. `bytes_per_s`: what a rank ("memory",
    "loopback") or a host ("network") moves to or from the others beyond that."""

    name: str
    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: int) -> float:
        """The time to move `nbytes`."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Topology:
    """Where the ranks of an axis are and how fast they reach each other; the same on every rank."""

    hosts: Hosts
    levels: tuple[Level, ...]

    def level(self, name: str) -> Level | None:
        """The level called `name`, None where there is none: no second rank or host."""
        return next((level for level in self.levels if level.name == name), None)


def probe(mesh: Mesh, axis: str) -> Topology:
    """Finds the hosts of this rank's line of `axis` and measures; every rank of the mesh together.

    Raises `DistributedError` when a rank dies or hangs meanwhile.
    """
    if mesh.size(axis) == 1:
        return Topology(Hosts(((0,),)), ())
    place = torch.device("cpu") if mesh.kind == "cpu" else device.device()
    whole = groups.make(mesh.lines(axis), mesh.kind, _TIMEOUT_S)
    assert whole is not None
    hosts = Hosts(tuple((rank,) for rank in range(mesh.size(axis))))
    if mesh.kind == "cpu":
        hosts = find_hosts(whole)
    names = mesh.ranks(axis)
    inside = [[names[rank] for rank in host] for host in hosts.ranks]
    every = groups.gather_objects(inside)
    hosts_of_all = sorted({tuple(host) for one in every for host in one})
    first_of_all = sorted({tuple(host[0] for host in one) for one in every})
    local = groups.make(hosts_of_all, mesh.kind, _TIMEOUT_S)
    across = groups.make(first_of_all, mesh.kind, _TIMEOUT_S)
    queue = Queue(_TIMEOUT_S, place)
    found = []
    if any(len(host) > 1 for host in hosts_of_all):
        shared: Route | None = None
        if local is not None and shared_memory.available():
            mine = next(host for host in inside if groups.rank() in host)
            with observer.unseen():  # a host of one rank has none
                shared = Shared(local, mine)
        found.append(_measure("memory", local if shared else None, shared, queue))
        if shared is not None:
            with observer.unseen():
                groups.gather_objects(0, local)
            shared.close()
        found.append(_measure("loopback", local, _flat(local, place), queue))
    if any(len(line) > 1 for line in first_of_all):
        found.append(_measure("network", across, _flat(across, place), queue))
    for group in (whole, local, across):
        groups.end(group)
    return Topology(hosts, tuple(level for level in found if level is not None))


def _flat(group: dist.ProcessGroup | None, place: torch.device) -> Route | None:
    return None if group is None else Flat((group, group), Buffers(place), Account())


def _measure(
    name: str,
    group: dist.ProcessGroup | None,
    route: Route | None,
    queue: Queue,
) -> Level | None:
    """One level, measured by the ranks that have a route; all ranks of the world call it.

    Each line and host measures for itself, in as many rounds as it needs.
    """
    mine = None
    if route is not None and group is not None:
        with observer.unseen():
            mine = _fit(_exchange(route, queue, group), group)
    all_of_them = [one for one in groups.gather_objects(mine) if one is not None]
    if not all_of_them:
        return None
    return Level(name, max(one[0] for one in all_of_them), min(one[1] for one in all_of_them))


def _exchange(
    route: Route, queue: Queue, group: dist.ProcessGroup
) -> Callable[[int], Callable[[], None]]:
    """Makes, for a number of bytes, an all-gather in which each rank sends so many to others.

    Its own part lies in its place, so that nothing else is copied.
    """
    size = group.size()

    def prepare(nbytes: int) -> Callable[[], None]:
        numel = max(1, nbytes // 4 // (size - 1))
        out = route.buffer(size * numel, torch.float32)
        shard = out.view(size, numel)[group.rank()]

        def run() -> None:
            call = Call("all_gather", (), torch.float32, "probe")
            queue.launch(route.all_gather(shard, out, "probe"), call, shard, out).wait()
            device.synchronize([out.device])

        run()
        return run

    return prepare


def _fit(
    prepare: Callable[[int], Callable[[], None]], group: dist.ProcessGroup
) -> tuple[float, float]:
    """(latency in s, bytes per s)."""
    latency = _median_s(prepare(4), group, 9)
    nbytes = _FIRST
    while True:
        run = prepare(nbytes)
        once = _median_s(run, group, 1)
        if once >= _LONG_S or nbytes >= _LARGEST:
            break
        nbytes *= 4
    seconds = median([once, _median_s(run, group, 2)])
    return latency, nbytes / max(seconds - latency, 1e-9)


def _median_s(run: Callable[[], None], group: dist.ProcessGroup, times: int) -> float:
    """Median seconds of the slowest rank."""
    taken = []
    for _ in range(times):
        dist.barrier(group)
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return median(max(one) for one in zip(*groups.gather_objects(taken, group), strict=True))
