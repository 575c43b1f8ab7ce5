"""The learning rate of each group: what a schedule's factor is on, and what counts after a load."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from lezero.train.engine_arguments import check_held


class Rates:
    """The base rates of an optimizer's groups, which each group keeps as `engine_lr` (`initial_lr`
    belongs to torch's schedulers, which begin with it where they find one).

    A group's base is the rate that it has when the engine is made or, if it is added later, at the
    next step, save or load; or, where that is what the schedule of an earlier engine has made of a
    base, that base.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._bases: list[Any] = []
        self._initial: list[Any] = []  # of torch's schedulers, when groups were last looked at
        self._sizes: list[int] = []  # parameters of each group, when they were last checked
        self.take_new()

    def take_new(self) -> None:
        """Notes the base rates of groups that were added since; `OrderError` where groups that are
        new or have another number of parameters hold some that the model does not have."""
        found = self._optimizer.param_groups
        sizes = [len(group["params"]) for group in found]
        if sizes != self._sizes:
            check_held(self._model, found)
            self._sizes = sizes
        for group, base in zip(found, self._bases, strict=False):
            if "engine_lr" not in group:  # another optimizer's state was loaded, with its groups
                group["engine_lr"] = _copy(base)
        for group in found[len(self._bases) :]:
            if "engine_lr" not in group or group.get("scheduled_lr") != float(group["lr"]):
                group["engine_lr"] = _copy(group["lr"])
            self._bases.append(_copy(group["engine_lr"]))
        self._initial = [_copy(group.get("initial_lr")) for group in found]

    def begin_step(self, factor: float | None) -> None:
        """Sets the rate of each group to its base times the schedule's `factor`; None: no schedule,
        rates stay."""
        self.take_new()
        if factor is None:
            return
        for group, base in zip(self._optimizer.param_groups, self._bases, strict=True):
            group["lr"] = base * factor
            group["scheduled_lr"] = float(group["lr"])

    def settle(self) -> list[str]:
        """After a load has given each group the file's rates: the file's `lr` stays where the base
        is the same here as there; elsewhere this engine's base counts, as a sentence says that is
        returned.

        A scheduler of torch's that was made before the engine has changed the rate that the engine
        found; what the group was given is its `initial_lr` then.
        """
        told = []
        for number, group in enumerate(self._optimizer.param_groups):
            base, saved = self._bases[number], float(group["engine_lr"])
            given, here = group.get("initial_lr"), self._initial[number]
            by_torch = given is not None and "scheduled_lr" not in group
            if not (
                _same(base, saved)
                or (by_torch and _same(given, base))
                or (by_torch and here is not None and _same(given, here))
            ):
                told.append(
                    f"group {number} of the optimizer was trained with lr={saved:g} and is given "
                    f"lr={float(base):g} now, which counts from here on"
                )
                group["lr"] = _copy(base)
            group["engine_lr"] = _copy(base)
        return told


def _same(rate: Any, other: Any) -> bool:
    return math.isclose(rate, other, rel_tol=1e-6)  # a tensor has fewer digits


def _copy(rate: Any) -> Any:
    """Of a rate in a tensor, which optimizers change in place, a tensor of its own."""
    return rate.clone() if isinstance(rate, torch.Tensor) else rate
