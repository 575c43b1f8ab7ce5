"""What the optimizers of the process are told about sharded models.

Two hooks that torch calls around every step of every optimizer, registered once, when the first
model is sharded. Before a step: an optimizer that holds parameters which sharding replaced, or
which the model has lost, is refused, since its step would silently do nothing; so is one of a model
that has other parameters now, or that is not the same on all ranks. State that was loaded whole is
cut. After it: the whole copies are out of date.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as hooks

from lezero.core.errors import ConfigError, OrderError
from lezero.parallel.zero import alike, plain_state, probe
from lezero.parallel.zero.fsdp import OWNED, FsdpSharding, Owned
from lezero.parallel.zero.held import HELD, REPLACED, Held

if TYPE_CHECKING:
    from lezero.parallel.zero.sharding import Sharding

_registered = False
_tried: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = (
    weakref.WeakKeyDictionary()
)
"""With how many groups, and parameters that were trained, each was tried."""
_beside: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[torch.Tensor]] = (
    weakref.WeakKeyDictionary()
)
"""What each trains beside the sharded model, and has had no gradient to compare yet."""
_fitted: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_WHOLE = (torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon)


def register() -> None:
    global _registered
    if not _registered:
        # A compiled step runs them in Python: they exchange with other ranks.
        hooks.register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))
        hooks.register_optimizer_step_post_hook(torch.compiler.disable(_after_step))
        _registered = True


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises `OrderError` when `optimizer` holds parameters that its model does not have (any
    more), or the model has some that `lz.shard_` did not find."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    lost = [str(getattr(p, REPLACED)) for p in held if hasattr(p, REPLACED)]
    if lost:
        raise OrderError(
            f"the optimizer was built before sharding: {len(lost)} of its {len(held)} parameters "
            f"are no longer in the model ('{lost[0]}' is the first); build it after lz.shard_ "
            "(and after lz.materialize_, where the model was on meta)"
        )
    _check_models(held)


def _check_models(parameters: list[torch.Tensor]) -> None:
    modules: dict[int, set[int]] = {}
    lost: list[str] = []
    for parameter in parameters:
        held: Held | None = getattr(parameter, HELD, None)
        owned: Owned | None = getattr(parameter, OWNED, None)
        sharding = held.segment.unit.sharding if held else owned.sharding if owned else None
        if sharding is not None and id(sharding) not in modules:
            modules[id(sharding)] = sharding.structure.check()
        if held and all(id(m) not in modules[id(sharding)] for m, _ in held.places):
            lost.append(held.name)
    if lost:
        raise OrderError(
            f"the optimizer holds parameters that are no longer in the model: {len(lost)} of its "
            f"{len(parameters)}, '{lost[0]}' is the first; their modules were taken out after "
            "lz.shard_. Build the optimizer again from the parameters that there are"
        )


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """Raises `ConfigError` when `optimizer` needs whole parameters but is given shards."""
    if not isinstance(optimizer, _WHOLE):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = probe.split(parameter)
            if found is not None:
                raise ConfigError(
                    f"{type(optimizer).__name__} needs whole parameters and cannot keep its state "
                    f"in shards (stage {found.stage}); use lz.Zero(stage=0), or an optimizer that "
                    "works element by element, such as lz.optim.AdamW"
                )


def _check_reduced(optimizer: torch.optim.Optimizer) -> None:
    late = "not reduced over the ranks yet; run the last backward before step outside of no_sync"
    found: dict[int, FsdpSharding] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held = getattr(parameter, HELD, None)
            if held is not None and held.mark is not None and parameter.grad is not None:
                raise OrderError(
                    f"the gradient of '{held.name}' was collected under no_sync and is {late}"
                )
            owned: Owned | None = getattr(parameter, OWNED, None)
            if owned is not None:
                found[id(owned.sharding)] = owned.sharding
    if any(sharding.collected() for sharding in found.values()):
        raise OrderError(f"gradients were collected under no_sync and are {late}")


def _check_trained(optimizer: torch.optim.Optimizer) -> None:
    """Raises `OrderError` where the model has computed, but the step would change nothing."""
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    due = any(sharding.backward.due for sharding, _ in _stepped_by(optimizer))
    if due and held and all(p.grad is None for p in held):
        raise OrderError(
            f"{type(optimizer).__name__}.step: none of its {len(held)} parameters has a gradient, "
            "though the model has computed since the last backward. Call loss.backward() before, "
            "and without inputs=: what computes is not what model.parameters() gives"
        )


def _before_step(
    optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    check_optimizer(optimizer)
    _check_reduced(optimizer)
    closure = _has_closure(arguments, keywords)
    if not closure:
        _check_trained(optimizer)
    check_state(optimizer)
    groups = optimizer.param_groups
    has = len(groups), sum(p.requires_grad for group in groups for p in group["params"])
    if _tried.get(optimizer) != has:
        alike.check(optimizer)
        probe.check(optimizer)
        _beside[optimizer] = alike.beside(optimizer)
        if optimizer not in _tried:
            optimizer.register_load_state_dict_post_hook(_fitted.discard)
        _tried[optimizer] = has
    if not closure:
        _beside[optimizer] = alike.check_gradients(optimizer, _beside[optimizer])
    if optimizer not in _fitted:
        plain_state.take_rows(optimizer)
        _fitted.add(optimizer)
    for sharding, _ in _stepped_by(optimizer):
        sharding.stepping()


def _has_closure(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether the step computes the gradients, by a function that it was given."""
    return any(callable(one) for one in (*arguments[1:], *keywords.values()))


def _after_step(
    optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    if _has_closure(arguments, keywords):
        _beside[optimizer] = alike.check_gradients(optimizer, _beside.get(optimizer, []))
    for sharding, helds in _stepped_by(optimizer):
        sharding.stepped(helds)


def _stepped_by(optimizer: torch.optim.Optimizer) -> Iterable[tuple[Sharding, set[int]]]:
    """The shardings that `optimizer` has parameters of, and the `id` of each `Held`."""
    found: dict[int, tuple[Sharding, set[int]]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held = getattr(parameter, HELD, None)
            if held is not None:
                sharding = held.segment.unit.sharding
                found.setdefault(id(sharding), (sharding, set()))[1].add(id(held))
    return found.values()
