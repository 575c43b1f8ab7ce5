"""Gradients that reach a parameter from outside of the model's forward, at stages 1 to 3.

There a parameter is a DTensor, whose ranks torch takes to compute one and the same: of a gradient
of `parameter.full_tensor()` each keeps its rows. But a loss is each rank's own. So what that gives
here has its gradient averaged over the ranks, as those of the model are. What reaches a parameter
by other operations of DTensors is as the ranks have computed it: each has its rows of its own loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial

from lezero.core import groups
from lezero.core.errors import OrderError


class Outside:
    """Of one parameter. `alike(owner)`: whether the losses of all ranks weigh the same, as every
    rank knows; `reached(owner)` is called when a gradient comes. The owner is not kept: torch may
    never let go of a cycle through a tensor's hook."""

    def __init__(
        self,
        parameter: DTensor,
        name: str,
        owner: object,
        alike: Callable[[Any], bool],
        reached: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._name, self._owner, self._alike = name, weakref.ref(owner), alike
        self._reached = reached
        self._averaged = False
        whole = parameter.full_tensor

        def full_tensor(*, grad_placements: Any = None) -> torch.Tensor:
            if grad_placements is not None or not torch.is_grad_enabled():
                return whole(grad_placements=grad_placements)
            found = whole(grad_placements=[Partial()] * parameter.device_mesh.ndim)
            if found.requires_grad:
                found.register_hook(self._average)
            return found

        parameter.full_tensor = full_tensor  # type: ignore[method-assign]
        trained = parameter.requires_grad
        parameter.requires_grad_()  # only then torch takes a hook, which outlives a freeze
        parameter.register_hook(self._check)
        parameter.requires_grad_(trained)

    def _average(self, gradient: torch.Tensor) -> torch.Tensor:
        self._averaged = True
        return gradient / groups.world_size()

    def _check(self, _: torch.Tensor) -> None:
        averaged, self._averaged = self._averaged, False
        owner = self._owner()
        if owner is None:
            return
        self._reached(owner)
        if not averaged and not self._alike(owner):
            raise OrderError(
                f"a gradient reached '{self._name}' from outside of the model, as of a penalty, by "
                "operations on the shards of the ranks, whose batches count unlike: each would "
                "weigh it by its own. Compute it from the whole parameter, of which the gradient "
                "is averaged over the ranks: parameter.full_tensor().pow(2).sum(), say, instead of "
                "parameter.pow(2).sum().full_tensor()"
            )
