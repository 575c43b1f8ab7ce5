"""From a wire and the hosts of its ranks to a route: which topology, with which groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lezero.comm.account import Account
from lezero.comm.buffers import Buffers
from lezero.comm.codec import Codec, codec
from lezero.comm.coded import Coded
from lezero.comm.feedback import Feedback
from lezero.comm.flat import Flat
from lezero.comm.hierarchical import Hierarchical
from lezero.comm.mesh import Mesh
from lezero.comm.route import Route
from lezero.comm.shared import Shared
from lezero.comm.topology import Hosts, find_hosts
from lezero.comm.wire import AUTO, Wire
from lezero.core import groups
from lezero.core.errors import ConfigError

Lanes = tuple[dist.ProcessGroup, dist.ProcessGroup]


@dataclass
class Routing:
    """What a link is made of. `made`: the groups to end when it closes."""

    topology: str
    route: Route
    hosts: Hosts
    codec: Codec | None
    gather: Codec | None
    feedback: Feedback | None
    made: list[dist.ProcessGroup | None]
    device: torch.device
    coded: Coded | None = None
    outermost: Hierarchical | None = None

    def use(self, name: str, feedback: str) -> None:
        """Another codec from the next collective on; `coded` is there. Nothing is in flight."""
        assert self.coded is not None
        kept = self.feedback if feedback != "none" else None
        self.codec = codec(name) if name != "none" or kept is not None else None
        self.coded.use(self.codec, kept, feedback == "both")
        if self.outermost is not None:
            self.outermost.sum_in(torch.float32 if self.codec is not None else None)


def connect(
    wire: Wire,
    mesh: Mesh,
    axis: str,
    *,
    device: torch.device,
    account: Account,
    timeout_s: float,
    hosts: Sequence[Sequence[int]] | None,
) -> Routing:
    """Makes the groups and the route of a link; every rank together. The axis has several ranks."""
    lanes = _lanes(mesh.lines(axis), mesh.kind, timeout_s)
    made: list[dist.ProcessGroup | None] = [*lanes]
    found = Hosts(tuple(map(tuple, hosts))) if hosts is not None else Hosts(())
    if hosts is None and mesh.kind == "cpu" and wire.topology != "flat":
        found = find_hosts(lanes[0])
    try:
        topology = _choose(wire, mesh, found)
    except ConfigError:
        for lane in lanes:
            groups.end(lane)
        raise
    buffers = Buffers(device)
    auto = wire.codec == AUTO
    encoder = None if wire.codec == "none" or auto else codec(wire.codec)
    gather = None if wire.gather == "none" else codec(wire.gather)
    names = mesh.ranks(axis)
    feedback = None
    if wire.feedback != "none" or auto:
        share = len(found.ranks[0]) if topology == "hierarchical" else 1
        feedback = Feedback(mesh.index(axis), len(names), wire.feedback_dtype, device, share)
    route: Route
    coded: Coded | None = None
    outermost: Hierarchical | None = None
    if topology == "shared":
        route = Shared(lanes[0], names)
    else:
        inside = None
        if topology == "hierarchical":
            inside, lanes = _split(found, names, mesh.kind, timeout_s)
            made += [inside, *lanes]
        outer = Flat(lanes, buffers, account)
        if encoder is not None or gather is not None or auto:
            server = wire.feedback == "both"
            used = None if auto else feedback
            coded = outer = Coded(lanes, buffers, account, encoder, gather, used, server)
        route = outer
        if inside is not None:
            mine = next(host for host in found.ranks if mesh.index(axis) in host)
            local = [names[rank] for rank in mine]
            sums = torch.float32 if encoder is not None else None
            shared = Shared(inside, local)
            outermost = Hierarchical(shared, outer, len(found.ranks), buffers, sums)
            route = outermost
    return Routing(
        topology, route, found, encoder, gather, feedback, made, device, coded, outermost
    )


def _lanes(partition: Sequence[Sequence[int]], kind: str, timeout_s: float) -> Lanes:
    first = groups.make(partition, kind, timeout_s)
    second = groups.make(partition, kind, timeout_s)
    assert first is not None
    assert second is not None
    return first, second


def _split(
    hosts: Hosts, names: list[int], kind: str, timeout_s: float
) -> tuple[dist.ProcessGroup, Lanes]:
    """The group of this host's ranks and the lanes to its partners; for every line of the mesh."""
    inside = [[names[rank] for rank in host] for host in hosts.ranks]
    across = [list(partners) for partners in zip(*inside, strict=True)]
    every = groups.gather_objects([inside, across])
    local = groups.make(_distinct([one[0] for one in every]), kind, timeout_s)
    assert local is not None
    return local, _lanes(_distinct([one[1] for one in every]), kind, timeout_s)


def _distinct(partitions: list[list[list[int]]]) -> list[list[int]]:
    return sorted({tuple(part): part for parts in partitions for part in parts}.values())


def _choose(wire: Wire, mesh: Mesh, hosts: Hosts) -> str:
    """The topology, the same for every line of the mesh."""
    wanted = wire.topology
    if wanted == "flat":
        return "flat"
    if mesh.kind != "cpu":
        if wanted != "auto":
            raise ConfigError(
                f"wire.topology: '{wanted}' shares the memory of hosts, but the mesh moves tensors "
                f"of kind '{mesh.kind}'; use auto or flat"
            )
        return "flat"
    encoded = wire.codec not in ("none", AUTO) or wire.gather != "none"
    fits = {"shared": hosts.single, "hierarchical": hosts.regular}
    best = "flat"
    if hosts.single and not encoded:
        best = "shared"
    elif hosts.regular:
        best = "hierarchical"
    everywhere = groups.gather_objects([best, fits["shared"], fits["hierarchical"]])
    if wanted == "auto":
        return best if all(one[0] == best for one in everywhere) else "flat"
    if not all(one[1 if wanted == "shared" else 2] for one in everywhere):
        need = {
            "shared": "all ranks to share one host's memory",
            "hierarchical": "several hosts with equally many ranks, at least two, in order",
        }[wanted]
        raise ConfigError(
            f"wire.topology: '{wanted}' needs {need}, but the ranks of the hosts are "
            f"{', '.join(map(str, map(list, hosts.ranks)))}; use auto or flat"
        )
    return wanted
