"""Whole parameters out of shards, one at a time, and shards out of whole parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lezero.comm.whole import whole
from lezero.core import groups
from lezero.parallel.zero.fsdp import FsdpSharding
from lezero.parallel.zero.sharding import Sharding


@torch.no_grad()
def full_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of every parameter, on every rank; tied ones once.

    Collective: every rank runs through all. Only one parameter is whole at a time, as long as the
    caller keeps none.
    """
    for name, parameter in model.named_parameters():
        yield name, whole(parameter.detach(), name)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The `state_dict` of the unsharded model on rank 0, in host memory; {} on the others. What is
    no tensor (a module's extra state) is a copy of rank 0's.

    Collective. Parameters come one at a time, so that no other rank holds more than one of them.
    """
    found: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            value = whole(value, name).detach()
        if groups.is_main():
            is_tensor = isinstance(value, torch.Tensor)
            found[name] = value.cpu().clone() if is_tensor else copy.deepcopy(value)
    return found


def take_whole_values(model: nn.Module, sharding: Sharding | FsdpSharding) -> None:
    """From now on `model.load_state_dict` takes whole tensors too, of which it keeps the rows, and
    copies values into the parameters that there are, with `assign=True` too."""

    def cut(_: nn.Module, state: dict[str, Any], prefix: str, *__: object) -> None:
        layout = sharding.layout
        for name, parameter in model.named_parameters(remove_duplicate=False):
            value = state.get(prefix + name)
            if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor):
                continue
            if isinstance(value, DTensor) or value.shape != parameter.shape:
                continue  # torch says what is wrong with it
            rows = value[layout[name].start : layout[name].stop] if value.dim() else value
            state[prefix + name] = DTensor.from_local(
                rows if parameter.is_meta else rows.to(parameter.device),
                *(parameter.device_mesh, parameter.placements),
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )

    model.register_load_state_dict_pre_hook(cut)
    for module in model.modules():
        if module._parameters:
            module.register_load_state_dict_pre_hook(_copied)


def _copied(
    module: nn.Module, _: dict[str, Any], __: str, metadata: dict[str, Any], *___: object
) -> None:
    """Undoes `assign=True`: an optimizer would hold either the parameters from before, or new ones
    of which the sharding does not know."""
    if not any(p is not None and p.is_meta for p in module._parameters.values()):
        metadata["assign_to_params_buffers"] = False
