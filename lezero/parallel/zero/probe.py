"""Whether an optimizer can work on shards: tried out on a small parameter before its first step.

An optimizer that works element by element gives a shard the values that it would give those rows of
the whole parameter. Others (factored or matrix-wise ones) give other values, and some raise from
inside torch; no list of them would stay complete.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lezero.core import device, groups
from lezero.core.errors import ConfigError
from lezero.parallel.zero.fsdp import OWNED, Owned
from lezero.parallel.zero.held import HELD, Held, distributed, local
from lezero.parallel.zero.layout import Rows

_WIDTH = 8
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def check(optimizer: torch.optim.Optimizer) -> None:
    """Raises `ConfigError` on every rank when a group of `optimizer` cannot work on its shards.

    Collective. Nothing is said where a plain small parameter cannot be stepped either.
    """
    if type(optimizer).__module__.startswith("lezero.") or detect_fake_mode() is not None:
        return  # a forecast has no values, and no other ranks
    if _reaches_further(optimizer):
        return
    kinds: dict[tuple[int, int, torch.dtype], tuple[int, Split]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            found = split(parameter)
            if found is not None and parameter.dim():
                kinds.setdefault((index, parameter.dim(), parameter.dtype), (index, found))
    for index, found in kinds.values():
        problem = _differs(optimizer, index, found.parameter)
        told = next((text for text in groups.gather_objects(problem) if text), "")
        if told:
            raise ConfigError(
                f"{type(optimizer).__name__} cannot work on the shards of stage {found.stage}, as "
                f"of '{found.name}': {told}; use lz.Zero(stage=0), or an optimizer that works "
                "element by element, such as lz.optim.AdamW"
            )


class Split(NamedTuple):
    """A parameter of which each rank holds some rows."""

    parameter: DTensor
    name: str
    stage: int


def split(parameter: torch.Tensor) -> Split | None:
    """What `lz.shard_` split, by its own units or by FSDP2; None for other parameters."""
    held: Held | None = getattr(parameter, HELD, None)
    owned: Owned | None = getattr(parameter, OWNED, None)
    if not isinstance(parameter, DTensor):
        return None
    if held is not None:
        return Split(parameter, held.name, held.segment.unit.sharding.stage)
    return Split(parameter, owned.name, owned.sharding.stage) if owned is not None else None


def _reaches_further(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step may change the model past the groups, as that of an optimizer around another
    does (which is tried out before its own first step)."""
    own = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}
    kinds = torch.optim.Optimizer, nn.Module, nn.Parameter
    return any(isinstance(value, kinds) for value in tree_leaves(own))


def _differs(optimizer: torch.optim.Optimizer, index: int, like: DTensor) -> str:
    """What is wrong with the optimizer on shards such as those of `like`; "" for nothing."""
    mesh, place = like.device_mesh, local(like).device
    ranks = mesh.size(mesh.ndim - 1)
    rows = Rows((2 * ranks, *[_WIDTH] * (like.dim() - 1)), ranks)
    values = torch.linspace(-1, 1, 2 * rows.numel, dtype=torch.float64).to(place)
    # no pattern that a matrix-wise optimizer would leave as it is
    value, gradient = (values[part::2].sin().view(rows.shape).to(like.dtype) for part in (0, 1))
    gradient = gradient * (1 + value.square())
    first, last = rows.range(mesh.get_local_rank(mesh.ndim - 1))

    def sharded_as(tensor: torch.Tensor) -> torch.Tensor:
        return distributed(tensor[first:last].clone(), rows, mesh)

    with device.kept_generators(place):
        try:
            plain = [_stepped(optimizer, index, value, gradient, seed) for seed in (0, 0, 1)]
        except Exception:
            return ""
        try:
            sharded = _stepped(optimizer, index, sharded_as(value), sharded_as(gradient), 0)
        except Exception as error:
            if optimizer.param_groups[index].get("fused") and "sharding strategy" in str(error):
                return "torch has no fused step for shards here; give it fused=False"
            text = str(error) or type(error).__name__
            return text.splitlines()[0][:200].rstrip(".")
    if not torch.equal(plain[0], plain[2]):  # it adds noise
        return ""
    moved = (plain[0] - value).abs().max()
    apart = (local(sharded) - plain[0][first:last]).abs().max()
    near = 64 * torch.finfo(like.dtype).eps
    if float(apart) > near * max(float(moved), float(value.abs().max())):
        return "it does not work element by element, so that it would train otherwise there"
    return ""


def _stepped(
    optimizer: torch.optim.Optimizer,
    index: int,
    value: torch.Tensor,
    gradient: torch.Tensor,
    seed: int,
) -> torch.Tensor:
    """`value` after two steps with `gradient` under the options of one group."""
    torch.manual_seed(seed)
    parameter = nn.Parameter(value.clone())
    parameter.grad = gradient.clone()
    group = {k: copy.deepcopy(v) for k, v in optimizer.param_groups[index].items() if k != "params"}
    if isinstance(group.get("lr"), float | int):
        group["lr"] = 0.1  # a warmup may begin at nothing
    alike = object.__new__(type(optimizer))
    alike.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k != "step"}
    alike.__dict__ |= {hooks: OrderedDict() for hooks in _HOOKS}
    alike.__dict__ |= {
        "state": defaultdict(dict),
        "param_groups": [{**group, "params": [parameter]}],
    }
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # without others' hooks
    for _ in range(2):
        step(alike)
    return parameter.detach()
