"""State of an optimizer that came from a plain run: whole tensors beside parameters that are split.

`optimizer.load_state_dict` puts them there without a word, and a step would end inside of torch. So
before the next step each rank takes its rows of them, as it does of weights (`whole`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from lezero.optim.weights import WeightOptimizer
from lezero.parallel.zero import probe
from lezero.parallel.zero.held import distributed
from lezero.parallel.zero.layout import Rows


@torch.no_grad()
def take_rows(optimizer: torch.optim.Optimizer) -> None:
    """Cuts what is whole in the state of split parameters, and lets go of the rest of it."""
    split = list(_split(optimizer))
    by_rows = {key for parameter in split for key in _whole(optimizer, parameter)}
    for parameter in split:
        keys = _whole(optimizer, parameter) if parameter.dim() else sorted(by_rows)
        state = optimizer.state[parameter]
        for key in keys:
            if type(state.get(key)) is torch.Tensor:
                state[key] = _rows(state[key], parameter)


def _split(optimizer: torch.optim.Optimizer) -> Iterator[DTensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state.get(parameter) and probe.split(parameter) is not None:
                yield parameter


def _whole(optimizer: torch.optim.Optimizer, parameter: DTensor) -> list[str]:
    """The keys of tensors with an element for each of the parameter's, or with rows of their own
    for its rows (LeZero's scales of 8-bit state). Numbers, as of steps, stay as they are; what is
    a number because the parameter is one, the other parameters tell."""
    rows = isinstance(optimizer, WeightOptimizer)
    return [
        key
        for key, value in optimizer.state[parameter].items()
        if type(value) is torch.Tensor
        and value.dim()
        and (value.shape == parameter.shape or (rows and value.shape[0] == parameter.shape[0]))
    ]


def _rows(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    mesh = like.device_mesh
    rows = Rows(tuple(value.shape), mesh.size(mesh.ndim - 1))
    first, last = rows.range(mesh.get_local_rank(mesh.ndim - 1))
    return distributed((value[first:last] if value.dim() else value).clone(), rows, mesh)
