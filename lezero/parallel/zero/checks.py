"""What is refused before anything is split, with the parameter and the field to blame."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lezero.comm.mesh import Mesh
from lezero.comm.wire import AUTO, Wire
from lezero.core import groups, ledger
from lezero.core.errors import ConfigError, OrderError, UnlikeError
from lezero.core.tensors import parts
from lezero.parallel.zero.config import Zero
from lezero.parallel.zero.gradients import wide
from lezero.parallel.zero.lines import Lines
from lezero.parallel.zero.unit import Unit

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_KINDS = {
    "model": (nn.Module, "a torch.nn.Module"),
    "config": (Zero, "lz.Zero(stage=…)"),
    "wire": (Wire, "lz.Wire(codec=…)"),
    "mesh": (Mesh, 'lz.Mesh({"shard": …})'),
}


def check_kinds(**arguments: object) -> None:
    """Raises `ConfigError` for an argument of `lz.shard_` that is something else."""
    for name, value in arguments.items():
        kind, allowed = _KINDS[name]
        if not isinstance(value, kind) and not (name == "mesh" and value is None):
            raise ConfigError(f"lz.shard_: {name} is {value!r:.80}; allowed is {allowed}")


def check_model(model: nn.Module) -> None:
    """Raises for a model that cannot be sharded whatever the ranks."""
    ledger.refuse_again(model, "shard_", "build the model anew to shard it otherwise")
    named = dict(model.named_parameters())
    if not named:
        raise ConfigError("lz.shard_: the model has no parameters; nothing can be split")
    for name, tensor in (*named.items(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ConfigError(
                f"lz.shard_: '{name}' of a lazy module has no shape yet; run the model once on a "
                "batch before (under torch.no_grad()), or build it with the shapes it needs"
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"'{name}'" if name else "the model"
            raise ConfigError(
                f"lz.shard_: {what} is compiled by TorchScript, whose parameters nothing can take "
                "out; shard the module that it was made from"
            )
    kinds = {p.device.type for p in named.values()}
    if len(kinds) > 1:
        raise ConfigError(
            f"lz.shard_: parameters lie on {' and '.join(sorted(kinds))}; move all to one device"
        )
    (kind,) = kinds
    if kind != "meta" and not moves(kind):
        raise ConfigError(
            f"lz.shard_: parameters lie on {kind}, but these ranks exchange tensors on "
            f"{groups.kind()}; move the model there first, or join with backend='gloo'"
        )
    for name, parameter in named.items():
        if parameter.dtype not in _TYPES:
            raise ConfigError(
                f"lz.shard_: parameter '{name}' is {parameter.dtype}; allowed are float32, "
                "bfloat16, float16 and float64 (shard before quantizing, or register it as a "
                "buffer)"
            )
        if isinstance(parameter, DTensor):
            raise OrderError(f"lz.shard_: parameter '{name}' is a DTensor, so it is split already")


def moves(kind: str) -> bool:
    """Whether the group of all ranks exchanges tensors of this kind of device."""
    return groups.world_size() == 1 or f"{kind}:" in dist.get_backend_config()


def check_max_norm(model: nn.Module, config: Zero) -> None:
    """Raises `ConfigError` for an embedding that changes its weights in forward: each rank would
    change the rows of its own batch, and ranks would no longer train one model."""
    if groups.world_size() == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"lz.shard_: embedding '{name}' has max_norm={module.max_norm}, which changes its "
                "weights in forward, on each rank those of its own batch; allowed with several "
                "ranks is None: limit the norms between steps"
            )


def agree_on_tensors(model: nn.Module) -> None:
    """Raises `UnlikeError` on every rank, naming the first parameter or buffer that ranks have
    unlike.

    Only digests are exchanged where they are alike.
    """
    mine = _listing(model)
    digests = groups.gather_objects(hashlib.sha256(repr(mine).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    every = groups.gather_objects(mine)
    rank = next(rank for rank, theirs in enumerate(every) if theirs != every[0])
    first, other = every[0], every[rank]
    at = next(
        (i for i, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]), None
    )
    if at is None or first[at][0] != other[at][0]:
        at = min(len(first), len(other)) if at is None else at
        names = [found[at][0] if at < len(found) else "nothing" for found in (first, other)]
        told = f"{names[0]} on rank 0 is {names[1]} on rank {rank}"
    else:
        kinds = ("name", "shape", "dtype", "requires_grad", "device", "first name")
        kind, ours, theirs = next(
            (kind, a, b) for kind, a, b in zip(kinds, first[at], other[at], strict=True) if a != b
        )
        name = first[at][0]
        told = f"{kind} of {name} is {ours} on rank 0 but {theirs} on rank {rank}"
    counts = [sum(one[0].startswith("parameter") for one in found) for found in (first, other)]
    raise UnlikeError(
        f"lz.shard_: the models differ ({counts[0]} parameters on rank 0, {counts[1]} on rank "
        f"{rank}): {told}; build the same model on every rank"
    )


def _listing(model: nn.Module) -> list[tuple[Any, ...]]:
    """What ranks must have alike of every parameter and buffer; tied ones have one first name."""
    first: dict[int, str] = {}
    named = {
        "parameter": model.named_parameters(remove_duplicate=False),
        "buffer": model.named_buffers(remove_duplicate=False),
    }
    found = []
    for what, tensors in named.items():
        for name, x in tensors:
            owner = first.setdefault(id(x), name)
            shapes = (x.shape, *(part.shape for part in parts(x) if part is not x))
            shape = tuple(map(tuple, shapes)) if len(shapes) > 1 else tuple(x.shape)
            kind = shape, str(x.dtype), x.requires_grad, x.device.type, owner
            found.append((f"{what} '{name}'", *kind))
    return found


def check_wires(units: list[Unit], lines: Lines) -> None:
    """Raises `ConfigError` for a wire that may not be used here, or cannot carry a parameter."""
    if lines.shard is not None:
        lines.shard.check("reduce_scatter")
        lines.shard.check("all_gather")
    if lines.replicate is not None:
        lines.replicate.check("all_reduce")
    wire = lines.wire
    for segment in (segment for unit in units for segment in unit.segments):
        where = f"lz.shard_: parameter '{segment.helds[0].name}' computes in {segment.compute}"
        if lines.shard is not None and segment.compute not in lines.types:
            raise ConfigError(
                f"{where}, which is not carried between ranks; allowed at stages 1 to 3 are "
                "float32, bfloat16 and float64 (convert the model, or use lz.Zero(stage=0))"
            )
        if lines.world > 1 and wide(segment.compute) == torch.float64:
            if wire.codec not in ("none", AUTO):
                raise ConfigError(f"{where}, which no codec carries; set wire.codec='none'")
            if lines.shard is not None and wire.gather != "none":
                raise ConfigError(f"{where}, which no codec carries; set wire.gather='none'")
