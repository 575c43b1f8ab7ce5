"""What a function assigns while it runs on fake tensors, taken back.

A module that keeps a cache, a moving average or a hidden state, and a training step that fills
gradients and an optimizer's state, would hold tensors without numbers from then on.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

_DEEPEST = 3  # of an optimizer's state: its table, that of a parameter, a list in it
_TABLES = {dict, list, OrderedDict, defaultdict}  # those of other types may refuse to be written


@contextmanager
def untouched(function: Callable[..., Any] | None, given: Any) -> Iterator[None]:
    """Attributes, tables and gradients of the modules and optimizers that `function` names, or is
    given, are afterwards what they were; what tensors hold is not looked at."""
    with restored(dict.fromkeys(_owners(function, given))):
        yield


@contextmanager
def restored(owners: Iterable[Any]) -> Iterator[None]:
    """The same of these modules and optimizers."""
    kept = [(table, table.copy()) for owner in owners for table in _tables(vars(owner), _DEEPEST)]
    grads = [(p, p.grad) for p in _parameters(owners)]
    try:
        yield
    finally:
        for table, before in kept:
            table.clear()
            (table.update if isinstance(table, dict) else table.extend)(before)
        for parameter, grad in grads:
            parameter.grad = grad


@contextmanager
def untouched_random() -> Iterator[None]:
    """Drawing fake numbers must not move anybody's generator."""
    state = torch.random.get_rng_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


def _owners(function: Any, given: Any) -> Iterator[Any]:
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    found = [function, getattr(function, "__self__", None), *tree_leaves(given)]
    found += [names.get(name) for name in (code.co_names if code else ())]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    for one in found:
        if isinstance(one, nn.Module):
            yield from (x for x in one.modules() if not isinstance(x, ScriptModule))
        elif isinstance(one, Optimizer):
            yield one


def _parameters(owners: Any) -> Iterator[Tensor]:
    for owner in owners:
        if isinstance(owner, nn.Module):
            yield from (p for p in owner._parameters.values() if p is not None)
        else:
            yield from (p for group in owner.param_groups for p in group["params"])


def _tables(table: Any, depth: int) -> Iterator[Any]:
    yield table
    if depth:
        for value in list(table.values() if isinstance(table, dict) else table):
            if type(value) in _TABLES:
                yield from _tables(value, depth - 1)
