"""How a unit learns that its module computes: the module's class gets a `__call__` around its own.

[Note: why a class and not hooks]
Hooks run inside `module.compile()` and would break its graph; a `__call__` lies around it. Names,
`isinstance` and `forward` stay as they were, and modules of one class stay of one class, so that
compiled code is shared by equal blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C import _functorch
from torch.utils._pytree import tree_map

from lezero.core.errors import OrderError
from lezero.core.function_modes import past_modes
from lezero.parallel.zero.unit import UNIT, Unit, passed_on

_classes: dict[tuple[type, bool], type] = {}


class _Sharded:
    def __call__(self, *args: Any, **keywords: Any) -> Any:
        unit: Unit = self.__dict__[UNIT]
        if unit.depth and unit.module is not self:
            return super().__call__(*args, **keywords)  # type: ignore[misc]
        call = super().__call__  # type: ignore[misc]
        if unit.shares and unit.alone:
            return _alone(unit, call, args, keywords)
        return _within(unit, call, args, keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise OrderError(
            "a sharded model cannot be copied: copy it before lz.shard_, and shard the copy too "
            "(docs/zero.md, Limits, has an average of weights)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OrderError(
            "a sharded model cannot be pickled, nor written by torch.save: save "
            "lezero.parallel.zero.full_state_dict(model), or checkpoints with Engine.save or "
            "Saver(together=True)"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """The first thing of a model that torch's DDP asks for."""
        raise OrderError(
            "DistributedDataParallel: this model went through lz.shard_, which sums its gradients "
            "over the ranks by itself; train it without DistributedDataParallel around it"
        )


def announce(module: nn.Module, unit: Unit) -> None:
    """Has calls of `module`, which is the unit's own or a part of it, go through `unit`.

    So does `forward` of the whole model, which some call by its name.
    """
    kind, root = type(module), unit.module is module and unit is unit.sharding.root
    if (kind, root) not in _classes:
        body: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        body |= {"__doc__": kind.__doc__, **({"forward": _forward(kind)} if root else {})}
        _classes[kind, root] = type(kind.__name__, (_Sharded, kind), body)
    module.__dict__[UNIT] = unit
    module.__class__ = _classes[kind, root]


def _forward(kind: type) -> Callable[..., Any]:
    inner = kind.forward  # type: ignore[attr-defined]

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        unit: Unit = self.__dict__[UNIT]
        if unit.depth:
            return inner(self, *args, **keywords)
        return _within(unit, functools.partial(inner, self), args, keywords)

    return forward


def _within(
    unit: Unit, call: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    enter, leave = _uncompiled()
    args, keywords = enter(unit, args, keywords)
    output = None
    try:
        output = call(*args, **keywords)
    finally:
        output = leave(unit, output)
    return output


def _alone(
    unit: Unit, call: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """A block that is called by itself, inside of the root, which has what it shares. Both listen
    for backward, the root to a view of what comes out."""

    def inner(*args: Any, **keywords: Any) -> Any:
        return tree_map(passed_on, _within(unit, call, args, keywords))

    return _within(unit.sharding.root, inner, args, keywords)


@functools.cache
def _uncompiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`_enter` and `_leave`, at which a compiled model falls back to Python for a moment."""
    return torch.compiler.disable(_enter), torch.compiler.disable(_leave)


def _enter(unit: Unit, args: Any, keywords: Any) -> tuple[Any, Any]:
    _refuse_transform(unit)
    found, enter = unit.cast(args, keywords), past_modes(unit.enter)
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # what is allocated here lives on into training
            enter()
    else:
        enter()
    return found


def _refuse_transform(unit: Unit) -> None:
    """Raises `OrderError` inside of `torch.func.grad` and its kin: their backward tells no hook of
    a unit when to gather and reduce, and whole copies that are made in them end with them."""
    stack, lines = _functorch.get_interpreter_stack(), unit.sharding.lines
    if not stack or (lines.shard is None and lines.replicate is None):
        return
    if any(level.key() == _functorch.TransformType.Grad for level in stack):
        raise OrderError(
            "torch.func.grad, vjp and jacrev cannot go around a model that lz.shard_ has split "
            "over several ranks; call torch.autograd.grad on what the model, or functional_call "
            "with tensors that require gradients, returns"
        )


def _leave(unit: Unit, output: Any) -> Any:
    return unit.leave(output)
