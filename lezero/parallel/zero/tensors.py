"""The tensors that a module has made: in what it returned and in its attributes."""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

_DEEP = 3
_MOST = 1000
_KNOWN = "_lezero_node"
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})
_TABLES = frozenset({dict, list, tuple, OrderedDict})


def returned(output: Any) -> list[torch.Tensor]:
    """Every tensor in nested lists, tuples, sets, mappings and dataclasses, and in the attributes
    of other objects, three of them in each other."""

    def inside(value: Any, deep: int) -> tuple[Iterable[Any], int]:
        if isinstance(value, Mapping):
            return value.values(), deep
        if isinstance(value, list | tuple | set | frozenset):
            return value, deep
        if isinstance(value, nn.Module | type):
            return (), deep
        if dataclasses.is_dataclass(value):
            return _fields(value), deep
        if deep and hasattr(value, "__dict__"):
            return vars(value).values(), deep - 1
        return (), deep

    return _tensors([output], inside, None)


def kept(values: Iterable[Any]) -> list[torch.Tensor]:
    """Every tensor in nested plain containers among the attributes of a module, which may hold
    anything: nothing of a class of its own is asked but dataclasses, nor more than so many."""

    def inside(value: Any, deep: int) -> tuple[Iterable[Any], int]:
        if type(value) is dict:
            return value.values(), deep
        if type(value) in (list, tuple):
            return value, deep
        if dataclasses.is_dataclass(value) and not isinstance(value, nn.Module | type):
            return _fields(value), deep
        return (), deep

    # most attributes of a module are numbers, names and empty tables
    worth = [v for v in values if type(v) not in _PLAIN and not (type(v) in _TABLES and not v)]
    return _tensors(worth, inside, _MOST)


def _fields(value: Any) -> list[Any]:
    return [getattr(value, field.name, None) for field in dataclasses.fields(value)]


def _tensors(
    values: Iterable[Any],
    inside: Callable[[Any, int], tuple[Iterable[Any], int]],
    most: int | None,
) -> list[torch.Tensor]:
    """Looks at each object once, breadth first, and in each of `values` at no more than `most`."""
    found = []
    seen: dict[int, Any] = {}
    for first in values:
        waiting, looked = deque([(first, _DEEP)]), 0
        while waiting and (most is None or looked < most):
            value, deep = waiting.popleft()
            looked += 1
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif id(value) not in seen:
                items, deeper = inside(value, deep)
                seen[id(value)] = value
                waiting += ((item, deeper) for item in itertools.islice(items, most))
    return found


def new_tensors(module: nn.Module | None, output: Any) -> list[torch.Tensor]:
    """What a call has left that gradients can come to: tensors in its `output` and in attributes of
    `module` and of the modules inside. Each is given once, to the call that made it."""
    found = returned(output)
    for part in module.modules() if module is not None else ():
        found += kept(vars(part).values())
    new = []
    for tensor in found:
        if tensor.requires_grad and not tensor.is_leaf:
            assert tensor.grad_fn is not None
            node = tensor.grad_fn._sequence_nr()  # another one once it was changed in place
            if tensor.__dict__.get(_KNOWN) != node:
                setattr(tensor, _KNOWN, node)
                new.append(tensor)
    return new
