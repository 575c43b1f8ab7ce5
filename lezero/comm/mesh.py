"""Ranks arranged on named axes, over torch's `DeviceMesh`.

    mesh = Mesh({"replicate": 2, "shard": 2})      # 4 ranks; neighbours share a "shard" line
    mesh.size("shard"), mesh.index("shard")        # 2, and this rank's place on its line
    DTensor.from_local(x, mesh["shard"].device_mesh, [Shard(0)])

Ranks are laid out row by row: the last axis joins neighbouring ranks, which usually share a host.
Every rank makes the same meshes in the same order. Close a mesh to give its groups back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from lezero.core import groups
from lezero.core.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Mesh:
    """`axes`: name → number of ranks, outermost first; their product is the number of ranks.

    `kind` is the kind of device whose tensors move over the mesh ("cpu", "cuda", …); by default
    what the group of all ranks is for. Raises `ConfigError`, the same on every rank, when the axes
    do not give every rank one place.
    """

    def __init__(self, axes: Mapping[str, int], kind: str | None = None) -> None:
        self.axes = dict(axes)
        world = groups.world_size()
        text = ", ".join(f"{name}: {size}" for name, size in self.axes.items())
        for name, size in self.axes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(
                    f"mesh: axis '{name}' has {size!r} ranks; allowed is a whole number, 1 or more"
                )
        if not self.axes or math.prod(self.axes.values()) != world:
            raise ConfigError(
                f"mesh: the axes ({text}) hold {math.prod(self.axes.values())} ranks, but there "
                f"are {world}; choose sizes whose product is {world}, or start as many ranks"
            )
        self.kind = kind or groups.kind()
        self._ranks = torch.arange(world).view(*self.axes.values())
        self._groups: dict[str, ProcessGroup | None] = {}
        self._device_mesh: DeviceMesh | None = None

    def names(self) -> tuple[str, ...]:
        """The axes, outermost first."""
        return tuple(self.axes)

    def size(self, axis: str) -> int:
        """Ranks on each line of `axis`."""
        self._dim(axis)
        return self.axes[axis]

    def index(self, axis: str) -> int:
        """This rank's place on its line of `axis`."""
        at = (self._ranks == groups.rank()).nonzero()[0]
        return int(at[self._dim(axis)])

    def lines(self, axis: str) -> list[list[int]]:
        """The ranks of every line of `axis`: each rank is in exactly one."""
        dim = self._dim(axis)
        return self._ranks.movedim(dim, -1).reshape(-1, self.axes[axis]).tolist()

    def ranks(self, axis: str) -> list[int]:
        """The ranks of this rank's line of `axis`, in order."""
        return next(line for line in self.lines(axis) if groups.rank() in line)

    def group(self, axis: str) -> ProcessGroup | None:
        """The group of this rank's line of `axis`; None where the world is one rank.

        Its first use makes it, with every rank together. Wires do not use it: each has its own.
        """
        if axis not in self._groups:
            self._groups[axis] = groups.make(self.lines(axis), self.kind)
        return self._groups[axis]

    @property
    def device_mesh(self) -> DeviceMesh:
        """The same mesh for DTensor. Its first use makes the groups, with every rank together.

        A process without a group gets one of its own (`core.groups.join_alone`).
        """
        if self._device_mesh is None:
            self._device_mesh = self._for_torch()
        return self._device_mesh

    def __getitem__(self, axis: str) -> Axis:
        self._dim(axis)
        return Axis(self, axis)

    def close(self) -> None:
        """Ends the groups made for this mesh; on every rank, in the same order."""
        for group in self._groups.values():
            groups.end(group)
        self._groups.clear()
        self._device_mesh = None

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Mesh({self.axes}, {self.kind!r})"

    def _dim(self, axis: str) -> int:
        if axis not in self.axes:
            raise ConfigError(f"mesh: there is no axis '{axis}'; it has {', '.join(self.axes)}")
        return self.names().index(axis)

    def _for_torch(self) -> DeviceMesh:
        from torch.distributed.device_mesh import DeviceMesh

        groups.join_alone()
        made = [self.group(axis) or self._single(axis) for axis in self.axes]
        names = self.names()
        return DeviceMesh.from_group(
            made if len(made) > 1 else made[0],
            self.kind,
            mesh=self._ranks.tolist(),
            mesh_dim_names=names,
        )

    def _single(self, axis: str) -> ProcessGroup:
        """DTensor wants a group for an axis of one rank too."""
        self._groups[axis] = made = groups.make(self.lines(axis), self.kind, single=True)
        assert made is not None
        return made


class Axis:
    """One axis of a mesh, where a mesh of one axis is wanted (`mesh["shard"]`)."""

    def __init__(self, mesh: Mesh, name: str) -> None:
        self.mesh, self.name = mesh, name
        self.size, self.index = mesh.size(name), mesh.index(name)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The line of this rank as a one-dimensional mesh for DTensor."""
        whole = self.mesh.device_mesh
        return whole if len(self.mesh.axes) == 1 else whole[self.name]

    @property
    def group(self) -> ProcessGroup | None:
        return self.mesh.group(self.name)

    @property
    def ranks(self) -> list[int]:
        return self.mesh.ranks(self.name)
