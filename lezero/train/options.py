"""The options of each of an optimizer's groups, its learning rate before all: what a schedule's
factor is on, and which counts after a load, the file's or this engine's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from lezero.checkpoint.optimizer import OF_THE_CODE
from lezero.train.engine_arguments import check_held

OURS = ("params", "param_names", "engine_lr", "engine_options", "scheduled_lr", "initial_lr")
"""Keys of a group that are no options."""
_OTHERS = ("max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
"""What torch's schedulers write down there."""
_NEED_STATE = ("momentum", "amsgrad", "centered")
"""What keeps state of its own from the first step on, unless it is 0 or False; SGD's momentum makes
it when it needs it."""


class Options:
    """What an optimizer's groups were built with. Each keeps the base of its rate as `engine_lr`
    (`initial_lr` belongs to torch's schedulers, which begin with it where they find one), and its
    other options as `engine_options`, pairs of a name and a value.

    A group's base is the rate that it has when the engine is made or, if it is added later, at the
    next step, save or load; or, where that is what the schedule of an earlier engine has made of a
    base, that base.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._bases: list[Any] = []
        self._built: list[list[list[Any]]] = []
        self._initial: list[Any] = []  # of torch's schedulers, when groups were last looked at
        self._cycled: list[bool] = []  # by one of them that moves the momentum
        self._sizes: list[int] = []  # parameters of each group, when they were last checked
        self.take_new()

    def take_new(self) -> None:
        """Notes the options of groups that were added since; `OrderError` where groups that are
        new or have another number of parameters hold some that the model does not have."""
        found = self._optimizer.param_groups
        sizes = [len(group["params"]) for group in found]
        if sizes != self._sizes:
            check_held(self._model, found)
            self._sizes = sizes
        for group, base, built in zip(found, self._bases, self._built, strict=False):
            if "engine_lr" not in group:  # another optimizer's state was loaded, with its groups
                group["engine_lr"], group["engine_options"] = _copy(base), built
        for group in found[len(self._bases) :]:
            if "engine_lr" not in group or group.get("scheduled_lr") != float(group["lr"]):
                group["engine_lr"] = _copy(group["lr"])
            group["engine_options"] = _built(group)
            self._bases.append(_copy(group["engine_lr"]))
            self._built.append(group["engine_options"])
        self._initial = [_copy(group.get("initial_lr")) for group in found]
        self._cycled = ["base_momentum" in group for group in found]

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
        """After a load has given each group the file's options: the file's stays where the group
        was built with the same here as there; elsewhere what this engine was built with counts, as
        sentences say that are returned.

        A scheduler of torch's that was made before the engine has changed the rate and the momentum
        that the engine found; the rate that the group was given is its `initial_lr` then.
        """
        told = []
        for number, group in enumerate(self._optimizer.param_groups):
            name = f"group {number} of the optimizer"
            changed, off = {}, {}
            if not self._same_rate(number, group):
                changed["lr"] = group["engine_lr"], self._bases[number]
            saved = dict(group["engine_options"])
            for key, value in self._built[number]:
                there = saved.get(key, value)
                if self._cycled[number] and key == "momentum":
                    continue
                if self._cycled[number] and key == "betas":
                    first = group["betas"][:1]
                    there, value = (*first, *there[1:]), (*first, *value[1:])
                if _same(there, value):
                    continue
                if value and not there and self._needs_state(key):
                    told.append(
                        f"{name} is given {key}={_text(value)} now, for which its state was not "
                        f"saved: it goes on with {key}={_text(there)}"
                    )
                    off[key] = there
                else:
                    changed[key] = there, value
            for key, (_, value) in changed.items():
                group[key] = _copy(value)
            if changed:
                there, here = (
                    ", ".join(f"{key}={_text(pair[side])}" for key, pair in changed.items())
                    for side in (0, 1)
                )
                count = "counts" if len(changed) == 1 else "count"
                told.append(
                    f"{name} was trained with {there} and is given {here} now, which {count} from "
                    "here on"
                )
            group["engine_lr"] = _copy(self._bases[number])
            group["engine_options"] = [[k, off.get(k, v)] for k, v in self._built[number]]
        return told

    def _needs_state(self, key: str) -> bool:
        lazy = key == "momentum" and type(self._optimizer) is torch.optim.SGD
        return key in _NEED_STATE and not lazy

    def _same_rate(self, number: int, group: dict[str, Any]) -> bool:
        base, saved = self._bases[number], group["engine_lr"]
        given, here = group.get("initial_lr"), self._initial[number]
        by_torch = given is not None and "scheduled_lr" not in group
        return (
            _same(base, saved)
            or (by_torch and _same(given, base))
            or (by_torch and here is not None and _same(given, here))
        )


def _built(group: dict[str, Any]) -> list[list[Any]]:
    leave = {"lr", *OURS, *_OTHERS, *OF_THE_CODE}
    return [[key, _copy(value)] for key, value in group.items() if key not in leave]


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(map(_same, one, two))
    if _is_number(one) and _is_number(two):
        both_nan = one != one and two != two
        return both_nan or math.isclose(one, two, rel_tol=1e-6)  # a tensor has fewer digits
    return bool(one == two)


def _is_number(value: Any) -> bool:
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    return one or isinstance(value, int | float)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    return repr(value) if isinstance(value, bool) or not _is_number(value) else f"{float(value):g}"


def _copy(value: Any) -> Any:
    """Of an option in a tensor, which optimizers change in place, a tensor of its own."""
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value] if isinstance(value, list) else (*map(_copy, value),)
    return value.clone() if isinstance(value, torch.Tensor) else value
