"""Stage 3 on accelerators: torch's FSDP2 behind the same verb.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023); LeZero adds
the choice of blocks and the face that its own units have. On a CPU FSDP2 blocks in its hooks, so
LeZero's own units are used there, and also for models on meta, for parameters without dims (FSDP2
refuses them), for batch norms beside 16-bit compute and over wires with a codec.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from lezero.comm.mesh import Mesh
from lezero.comm.wire import Wire
from lezero.core.errors import OrderError
from lezero.nn.blocks import blocks
from lezero.parallel.zero.config import Zero
from lezero.parallel.zero.held import REPLACED, local
from lezero.parallel.zero.layout import Part, Rows

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
"""Their parameters stay in the type of their statistics, whatever the rest computes in."""


def fits(model: nn.Module, config: Zero, wire: Wire, mesh: Mesh, place: torch.device) -> bool:
    """Whether FSDP2 does what is asked."""
    sharded = config.stage == 3 and "shard" in mesh.names() and mesh.size("shard") > 1
    plain = wire.codec == "none" and wire.gather == "none"
    parameters = list(model.parameters())
    known = all(p.dim() > 0 and not p.is_meta for p in parameters)
    if config.compute != "auto":
        known &= not any(isinstance(module, BATCH_NORMS) for module in model.modules())
    return place.type != "cpu" and sharded and plain and known


class FsdpSharding:
    """What `sharding_of(model)` gives for a model under FSDP2: the public part of `Sharding`."""

    def __init__(self, model: nn.Module, config: Zero, mesh: Mesh) -> None:
        self.model, self.config, self.stage, self.mesh = model, config, config.stage, mesh
        self.units = [name for name, _ in blocks(model)] + [""]
        self.ranks, self.rank = mesh.size("shard"), mesh.index("shard")
        self._sync = True

    @property
    def layout(self) -> dict[str, Part]:
        named = self.model.named_parameters(remove_duplicate=False)
        return {
            name: Part(tuple(p.shape), *Rows(tuple(p.shape), self.ranks).range(self.rank))
            for name, p in named
        }

    def local(self, name: str) -> torch.Tensor:
        for found, parameter in self.model.named_parameters(remove_duplicate=False):
            if found == name:
                return local(parameter.detach())
        raise OrderError(f"the sharded model has no parameter '{name}'")

    @torch.no_grad()
    def write(self, name: str, rows: torch.Tensor) -> None:
        self.local(name).copy_(rows)

    def synchronize(self, on: bool) -> bool:
        before, self._sync = self._sync, on
        model: Any = self.model
        model.set_requires_gradient_sync(on)
        return before

    def close(self) -> None:
        """Nothing is given back: all groups are the mesh's, and they outlive the model.

        The mesh may be the user's; and torch remembers what operations on DTensors give by meshes
        that compare equal, so that the next model would look for the ended groups of this one.
        """


def apply(model: nn.Module, config: Zero, mesh: Mesh) -> FsdpSharding:
    """Puts FSDP2 around every block and the model, in place."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    before = dict(model.named_parameters())
    kinds = {config.compute_dtype(p.dtype) for p in before.values()}
    compute = kinds.pop() if len(kinds) == 1 else None
    wide = torch.promote_types(compute or torch.float32, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=wide)
    arranged = mesh.device_mesh if mesh.size("shard") < _world(mesh) else mesh["shard"].device_mesh
    found = blocks(model)
    owners: dict[int, int] = {}
    for _, block in found:
        for parameter in block.parameters():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for _, block in found:
        # A weight that two blocks share belongs to the root; FSDP2 cannot take it out of one.
        if all(owners[id(p)] == 1 for p in block.parameters()):
            fully_shard(block, mesh=arranged, mp_policy=policy)
    fully_shard(model, mesh=arranged, mp_policy=policy)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter.placements[-1], Shard)
        if before[name] is not parameter:
            setattr(before[name], REPLACED, name)
    return FsdpSharding(model, config, mesh)


def _world(mesh: Mesh) -> int:
    size = 1
    for axis in mesh.names():
        size *= mesh.size(axis)
    return size
