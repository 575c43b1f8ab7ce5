"""Whether the ranks step one optimizer: compared before the first step of each.

Other options on one rank would train its shards, or its replica, otherwise than the rest; so would
parameters beside a sharded model, whose gradients nobody reduces. Neither shows in the loss.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor

from lezero.core import groups
from lezero.core.errors import ConfigError
from lezero.parallel.zero.agreement import agree
from lezero.parallel.zero.fsdp import OWNED
from lezero.parallel.zero.held import HELD
from lezero.parallel.zero.norm import norm_of

_PLAIN = (bool, int, float, str, type(None))


def check(optimizer: torch.optim.Optimizer) -> None:
    """Raises on every rank where `optimizer` is not the same on all: `DistributedError` for other
    options or parameters, `ConfigError` for gradients of its own on each.

    Collective where it has parameters of a sharded model.
    """
    if groups.world_size() == 1 or detect_fake_mode() is not None:
        return  # a forecast has no values, and no other ranks
    held = [p for group in optimizer.param_groups for p in group["params"]]
    beside = [p for p in held if _name(p) is None]
    if len(beside) == len(held):
        return
    agree(f"{type(optimizer).__name__}.step", _description(optimizer))
    if beside:
        _check_reduced(optimizer, beside)


def _name(parameter: torch.Tensor) -> str | None:
    """Its name in the sharded model; None where it is of none."""
    found = getattr(parameter, HELD, None) or getattr(parameter, OWNED, None)
    return found.name if found is not None else None


def _description(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """What all ranks must have alike, in plain data."""
    told: dict[str, object] = {"optimizer": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        names = [f"{_name(p)} {tuple(p.shape)} {p.dtype}" for p in group["params"]]
        told[f"parameters of group {index}"] = len(names)
        told[f"digest of the parameters of group {index}, in order"] = hashlib.sha256(
            "\n".join(names).encode()
        ).hexdigest()[:8]
        for key, value in group.items():
            if key != "params" and (plain := _plain(value)) is not None:
                told[f"{key} of group {index}"] = plain[0]
    return told


def _plain(value: Any) -> tuple[object] | None:
    """An option as plain data; None for one that cannot be compared, such as a function."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, tuple | list) and all(isinstance(one, _PLAIN) for one in value):
        return (list(value),)
    return (value,) if isinstance(value, _PLAIN) else None


def _check_reduced(optimizer: torch.optim.Optimizer, beside: list[torch.Tensor]) -> None:
    def told(parameter: torch.Tensor) -> str:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse or isinstance(gradient, DTensor):
            return ""
        return float(norm_of(gradient)).hex()

    every = groups.gather_objects([told(p) for p in beside])
    own = [p for p, *norms in zip(beside, *every, strict=True) if len(set(norms)) > 1]
    if own:
        raise ConfigError(
            f"{type(optimizer).__name__}.step: {len(own)} of its parameters are of no sharded "
            f"model, one of shape {tuple(own[0].shape)}, and their gradients differ between the "
            "ranks, so that each would train values of its own. Shard the whole of what is "
            "trained, reduce their gradients, or give them an optimizer of their own"
        )
