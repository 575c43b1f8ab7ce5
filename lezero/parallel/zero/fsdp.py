"""Stage 3 on accelerators: torch's FSDP2 behind the same verb.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023); LeZero adds
the choice of blocks and the face that its own units have. On a CPU FSDP2 blocks in its hooks, so
LeZero's own units are used there, and also for what FSDP2 refuses (parameters without dims, or of
several types in one block), for models on meta, for batch norms beside 16-bit compute and over
wires with a codec.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from lezero.comm.mesh import Mesh
from lezero.comm.wire import Wire
from lezero.core.errors import OrderError
from lezero.nn.blocks import blocks
from lezero.parallel.zero.config import Zero
from lezero.parallel.zero.fsdp_unused import Unused
from lezero.parallel.zero.held import local, mark_alike, register, retire
from lezero.parallel.zero.instead import adopt, stands_in
from lezero.parallel.zero.layout import Part, Rows
from lezero.parallel.zero.outside import Outside
from lezero.parallel.zero.structure import Structure

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
"""Their parameters stay in the type of their statistics, whatever the rest computes in."""
OWNED = "_lezero_fsdp"


class Owned(NamedTuple):
    """What a parameter under FSDP2 tells the optimizer's guard, as its attribute `OWNED`."""

    name: str
    sharding: FsdpSharding


def fits(model: nn.Module, config: Zero, wire: Wire, mesh: Mesh, place: torch.device) -> bool:
    """Whether FSDP2 does what is asked."""
    sharded = config.stage == 3 and "shard" in mesh.names() and mesh.size("shard") > 1
    plain = wire.codec == "none" and wire.gather == "none"
    known = all(p.dim() > 0 and not p.is_meta for p in model.parameters())
    known &= all(len({p.dtype for p in one if p.requires_grad}) <= 1 for one in _groups(model))
    if config.compute != "auto":
        known &= not any(isinstance(module, BATCH_NORMS) for module in model.modules())
    return place.type != "cpu" and sharded and plain and known


def _alone(model: nn.Module) -> list[nn.Module]:
    """The blocks that are split by themselves: those that share no weight with another, since FSDP2
    cannot take it out of one; it belongs to the root."""
    found = [block for _, block in blocks(model)]
    owners = Counter(id(p) for block in found for p in block.parameters())
    return [block for block in found if all(owners[id(p)] == 1 for p in block.parameters())]


def _groups(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters that FSDP2 gathers together: of each block, and the root's."""
    found = [list(block.parameters()) for block in _alone(model)]
    inside = {id(p) for group in found for p in group}
    return [*found, [p for p in model.parameters() if id(p) not in inside]]


class FsdpSharding:
    """What `sharding_of(model)` gives for a model under FSDP2: the public part of `Sharding`.

    With `mute` this rank's gradients count as zeros in what a backward reduces, whatever they are.
    `alike`: the caller weighs the losses of all ranks alike.
    """

    def __init__(self, model: nn.Module, config: Zero, mesh: Mesh) -> None:
        self.model, self.config, self.stage, self.mesh = model, config, config.stage, mesh
        self.units = [name for name, _ in blocks(model)] + [""]
        self.ranks, self.rank = mesh.size("shard"), mesh.index("shard")
        self.structure = Structure(
            model, [(part, name) for part in model.modules() for name in part._parameters]
        )
        self.mute, self.alike = False, True
        self._sync = True
        self._parts = _split_modules(model)
        for part in self._parts:
            part.set_custom_reduce_scatter(_Mutable(self))
        self.unused = Unused([part._get_fsdp_state() for part in self._parts], self._reduced())
        # Torch takes for the root what is called first, and then refuses the model around a block.
        self._parts[0]._get_fsdp_state()._lazy_init()
        for group in self._reduced():
            group.unshard = _checked(group, group.unshard)

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

    def collected(self) -> bool:
        """Whether a backward under `no_sync` has left gradients that are not reduced yet."""
        return any(_kept(one) for group in self._reduced() for one in group.fsdp_params)

    def _reduced(self) -> list[Any]:
        """What FSDP2 reduces together: of each block, and the root's."""
        return [group for part in self._parts for group in _groups_in(part._get_fsdp_state())]

    def close(self) -> None:
        """Nothing is given back: all groups are the mesh's, and they outlive the model.

        The mesh may be the user's; and torch remembers what operations on DTensors give by meshes
        that compare equal, so that the next model would look for the ended groups of this one.
        """


class _Mutable:
    """How FSDP2 reduces gradients: torch's own way, after zeros where this rank is mute."""

    def __init__(self, sharding: FsdpSharding) -> None:
        self._sharding = sharding

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._sharding.mute:
            input_tensor.zero_()
        # torch renamed it in 2.13 and warns of the old name
        scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        work: dist.Work | None = scatter(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        return work


def _split_modules(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _groups_in(state: Any) -> list[Any]:
    """Of one module; torch 2.13 made a list of what was one or None."""
    several = getattr(state, "_fsdp_param_groups", None)
    found = [state._fsdp_param_group] if several is None else several
    return [group for group in found if group is not None]


def _checked(group: Any, gather: Callable[..., None]) -> Callable[..., None]:
    """`gather`, after a look at what is registered: torch would put its own over that, unread."""

    def unshard(*arguments: Any, **keywords: Any) -> None:
        if group.is_sharded:
            for one in group.fsdp_params:
                _check(one)
        gather(*arguments, **keywords)

    return unshard


def _check(one: Any) -> None:
    info = one._module_info
    modules, names = (
        (info.module, *info.shared_modules),
        (info.param_name, *info.shared_param_names),
    )
    for module, name in zip(modules, names, strict=True):
        found = module._parameters.get(name)
        if found is one.sharded_param:
            continue
        if stands_in(found):
            raise OrderError(
                f"functional_call: FSDP2 computes with its own '{one._param_fqn}', not with what "
                "was given; use lz.Zero(stage=2), or copy values into the parameters"
            )
        adopt(one._param_fqn, one.sharded_param, found)
        register(module, name, one.sharded_param)


def _kept(parameter: Any) -> bool:
    """Whether FSDP2 has a gradient of a whole parameter: in fp32, or as it came where that is
    the type of the sums."""
    whole = getattr(parameter, "_unsharded_param", None)
    there = whole is not None and whole.grad is not None
    return there or parameter.unsharded_accumulated_grad is not None


def apply(model: nn.Module, config: Zero, mesh: Mesh) -> FsdpSharding:
    """Puts FSDP2 around every block and the model, in place."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    before = dict(model.named_parameters())
    kinds = {config.compute_dtype(p.dtype) for p in before.values()}
    compute = next(iter(kinds)) if len(kinds) == 1 else None
    wide = torch.float32
    for kind in kinds:
        wide = torch.promote_types(wide, kind)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=wide)
    arranged = mesh.device_mesh if mesh.size("shard") < _world(mesh) else mesh["shard"].device_mesh
    for block in _alone(model):
        fully_shard(block, mesh=arranged, mp_policy=policy)
    # True for the root too: torch would leave it whole after a forward until the next backward, and
    # whoever reads, loads or steps parameters in between would get the whole copies.
    fully_shard(model, mesh=arranged, mp_policy=policy, reshard_after_forward=True)
    sharding = FsdpSharding(model, config, mesh)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter.placements[-1], Shard)
        setattr(parameter, OWNED, Owned(name, sharding))
        reached = functools.partial(_reached, shard=id(parameter))
        Outside(parameter, name, sharding, lambda owner: owner.alike, reached)
        if before[name] is not parameter:
            mark_alike(parameter, before[name])
            retire(before[name], name)
    return sharding


def _reached(sharding: FsdpSharding, shard: int) -> None:
    sharding.unused.reached(shard)


def _world(mesh: Mesh) -> int:
    size = 1
    for axis in mesh.names():
        size *= mesh.size(axis)
    return size
