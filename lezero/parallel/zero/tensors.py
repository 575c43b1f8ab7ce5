"""The tensors that a module has made: in what it returned and in its attributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_DEEP = 3
_KNOWN = "_lezero_node"


def tensors_in(value: Any, deep: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples, mappings and dataclasses; and in attributes of other
    objects, as far as `deep` of them in each other."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, deep)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item, deep)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), deep)
    elif deep and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        for item in vars(value).values():
            yield from tensors_in(item, deep - 1)


def new_tensors(module: nn.Module | None, output: Any) -> list[torch.Tensor]:
    """What a call has left that gradients can come to: tensors in its `output` and in attributes of
    `module` and of the modules inside. Each is given once, to the call that made it."""
    found = list(tensors_in(output, _DEEP))
    for part in module.modules() if module is not None else ():
        for value in vars(part).values():
            found += tensors_in(value)
    new = []
    for tensor in found:
        if tensor.requires_grad and not tensor.is_leaf:
            assert tensor.grad_fn is not None
            node = tensor.grad_fn._sequence_nr()  # another one once it was changed in place
            if tensor.__dict__.get(_KNOWN) != node:
                setattr(tensor, _KNOWN, node)
                new.append(tensor)
    return new
