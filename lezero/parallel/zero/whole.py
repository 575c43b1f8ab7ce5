"""Whole parameters out of shards, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def full_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of every parameter, on every rank; tied ones once.

    Collective: every rank runs through all. Only one parameter is whole at a time, as long as the
    caller keeps none.
    """
    for name, parameter in model.named_parameters():
        data = parameter.detach()
        yield name, data.full_tensor() if isinstance(data, DTensor) else data


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The `state_dict` of the unsharded model on rank 0, in host memory; {} on the others.

    Collective. Parameters come one at a time, so that no other rank holds more than one of them.
    """
    from lezero.core import groups

    found: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            continue
        data = value.full_tensor() if isinstance(value, DTensor) else value
        if groups.is_main():
            found[name] = data.detach().cpu().clone()
    return found
