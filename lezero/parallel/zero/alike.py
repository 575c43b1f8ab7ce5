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

_PLAIN = (bool, int, float, str, type(None))


def check(optimizer: torch.optim.Optimizer) -> None:
    """Raises `UnlikeError` on every rank where `optimizer` has not the same kind, options and
    parameters on all. Collective where it has parameters of a sharded model."""
    if _shared(optimizer):
        agree(f"{type(optimizer).__name__}.step", _description(optimizer))


def beside(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What `optimizer` trains beside the parameters of a sharded model."""
    found = [p for p in _parameters(optimizer) if _name(p) is None and p.requires_grad]
    return found if _shared(optimizer) else []


def check_gradients(
    optimizer: torch.optim.Optimizer, beside: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Raises `ConfigError` on every rank where the gradients of `beside` are each rank's own.
    Returns those that have none yet on some rank. Collective where there are any."""
    if detect_fake_mode() is not None:
        return beside
    every = groups.gather_objects([_digest(p.grad) for p in beside]) if beside else []
    own = [p for p, *said in zip(beside, *every, strict=True) if len(set(said)) > 1]
    if own:
        raise ConfigError(
            f"{type(optimizer).__name__}.step: {len(own)} of its parameters are of no sharded "
            f"model, one of shape {tuple(own[0].shape)}, and their gradients differ between the "
            "ranks, so that each would train values of its own. Shard the whole of what is "
            "trained, reduce their gradients, or give them an optimizer of their own"
        )
    return [p for p, *said in zip(beside, *every, strict=True) if not all(said)]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _shared(optimizer: torch.optim.Optimizer) -> bool:
    """Whether several ranks step it together. (A forecast has no values, and no other ranks.)"""
    if groups.world_size() == 1 or detect_fake_mode() is not None:
        return False
    return any(_name(p) is not None for p in _parameters(optimizer))


def _name(parameter: torch.Tensor) -> str | None:
    """Its name in the sharded model; None where it is of none."""
    found = getattr(parameter, HELD, None) or getattr(parameter, OWNED, None)
    return found.name if found is not None else None


def _description(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """What all ranks must have alike, in plain data."""
    told: dict[str, object] = {"optimizer": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        held = group["params"]
        names = [f"{_name(p)} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for p in held]
        told[f"parameters of group {index}"] = len(held)
        told[f"trained parameters of group {index}"] = sum(p.requires_grad for p in held)
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
    if isinstance(value, tuple | list):
        each = [_plain(one) for one in value if isinstance(one, _PLAIN)]
        return ([one[0] for one in each if one],) if len(each) == len(value) else None
    if isinstance(value, float) and value != value:  # a NaN is not even equal to itself
        return (str(value),)
    return (value,) if isinstance(value, _PLAIN) else None


def _digest(gradient: torch.Tensor | None) -> str:
    """Of its values; "" where there is none or all are 0, as behind a layer that begins with zeros.
    DTensors are for who made them to reduce."""
    if gradient is None or isinstance(gradient, DTensor):
        return "a DTensor" if gradient is not None else ""
    gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        parts = [gradient.indices(), gradient.values()]
    else:
        parts = [gradient.resolve_conj().resolve_neg()]
    if not parts[-1].any():
        return ""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return found.hexdigest()[:16]
