"""The mesh and the links of one sharded model."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lezero.comm import link as links
from lezero.comm.link import Link
from lezero.comm.mesh import Mesh
from lezero.comm.watch import Watch
from lezero.comm.wire import Wire
from lezero.core import groups, in_flight
from lezero.core.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("replicate", "shard")


class Slabs:
    """Carves buffers out of large ones: each that a link makes may cost it a file descriptor."""

    BYTES, ALIGN = 64 << 20, 64

    def __init__(self, link: Link) -> None:
        self._link = link
        self._slab, self._used = torch.empty(0, dtype=torch.float32), 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` zeros. Memory that nobody has touched is not resident."""
        size = numel * dtype.itemsize
        if self._used + size > self._slab.nbytes:
            self._slab = self._link.buffer(max(self.BYTES, size + 3) // 4, torch.float32)
            self._used = 0
        start, self._used = self._used, -(-(self._used + size) // self.ALIGN) * self.ALIGN
        return self._slab.view(torch.uint8)[start : start + size].view(dtype)


class Lines:
    """How the ranks of a sharded model meet: `shard` splits the state, `replicate` repeats it.

    A link is None where its axis has one rank, and `mesh` (for DTensor) where nothing is split.
    Starts the watch, so that a rank that is lost or does something else is named.
    """

    def __init__(self, mesh: Mesh, wire: Wire, place: torch.device) -> None:
        self.arranged, self.wire, self.place = mesh, wire, place
        self.world = groups.world_size()
        Watch.start()
        sizes = {axis: mesh.size(axis) if axis in mesh.names() else 1 for axis in AXES}
        self.ranks, self.replicas = sizes["shard"], sizes["replicate"]
        self.rank = mesh.index("shard") if self.ranks > 1 else 0
        self.shard = Link(wire, mesh, "shard") if self.ranks > 1 else None
        summing = wire.model_copy(update={"gather": "none"})  # nothing is gathered over this axis
        self.replicate = Link(summing, mesh, "replicate") if self.replicas > 1 else None
        self.mesh: DeviceMesh | None = mesh.device_mesh if self.ranks > 1 else None
        self.types = links.TYPES
        self._slabs: dict[int, Slabs] = {}

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that hold the shards of one copy; for small exchanges beside the links."""
        return self.arranged.group("shard") if self.ranks > 1 else None

    def buffer(self, numel: int, dtype: torch.dtype, *, replicate: bool = False) -> torch.Tensor:
        """Zeros that the links move without a copy (those of the replicate axis if asked)."""
        link = self.replicate if replicate or self.shard is None else self.shard
        if link is None:
            return torch.zeros(numel, dtype=dtype, device=self.place)
        return self._slabs.setdefault(id(link), Slabs(link)).take(numel, dtype)

    def take_first(self, values: torch.Tensor) -> None:
        """`values` become those of the first of the ranks that split one copy."""
        with groups.watched("broadcast", values.shape, values.dtype, "sums without dims"):
            in_flight.wait(dist.broadcast(values, group=self.group, group_src=0, async_op=True))

    def step_done(self) -> None:
        """A step has been taken with the sums of its backwards (`Link.step_done`)."""
        for link in (self.shard, self.replicate):
            if link is not None:
                link.step_done()

    def close(self) -> None:
        """Ends the links. The mesh stays, as under FSDP2 (`FsdpSharding.close`)."""
        for link in (self.shard, self.replicate):
            if link is not None:
                link.close()


def of_all_ranks(axis: str, kind: str) -> Mesh:
    """All ranks on one axis: one mesh for all models, since each has threads and sockets, and
    nothing tells when the last tensor that needs it is gone. It ends with the group of all
    ranks."""
    world = dist.group.WORLD if groups.active() else None
    if world is None:
        return Mesh({axis: groups.world_size()}, kind)
    kept = _of_all_ranks.setdefault(world, {})
    if (axis, kind) not in kept:
        kept[axis, kind] = Mesh({axis: groups.world_size()}, kind)
    return kept[axis, kind]


_of_all_ranks: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[str, str], Mesh]] = (
    weakref.WeakKeyDictionary()
)


def arrange(stage: int, mesh: Mesh | None, kind: str) -> Mesh:
    """The user's mesh, checked, or all ranks on the one axis that the stage needs."""
    if mesh is None:
        return of_all_ranks("replicate" if stage == 0 else "shard", kind)
    unknown = [name for name in mesh.names() if name not in AXES]
    if unknown:
        raise ConfigError(
            f"mesh: axis '{unknown[0]}' means nothing to ZeRO; allowed are {' and '.join(AXES)}"
        )
    if mesh.kind != kind:
        raise ConfigError(
            f"mesh: it is for tensors on {mesh.kind}, but the model lies on {kind}; give it the "
            f"kind of the model, Mesh(axes, '{kind}')"
        )
    if mesh.names() not in (AXES, AXES[:1], AXES[1:]):
        raise ConfigError(
            f"mesh: its axes are {' and '.join(mesh.names())}; allowed is 'replicate' before "
            "'shard', so that neighbouring ranks split one copy: Mesh({'replicate': …, 'shard': …})"
        )
    if stage == 0 and "shard" in mesh.names() and mesh.size("shard") > 1:
        raise ConfigError(
            f"mesh: axis 'shard' has {mesh.size('shard')} ranks, but stage 0 splits nothing; "
            "put all ranks on 'replicate', or choose stage 1, 2 or 3"
        )
    return mesh
