"""A model without memory to try things on, and a model put back where they fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_KINDS = ("_parameters", "_buffers", "_modules")


def twin(model: nn.Module) -> nn.Module:
    """The modules of `model`, with their parameters and buffers on meta; all else is shared, as it
    may be what cannot be copied (a lock, a file, a process group)."""
    made: dict[int, Any] = {}

    def of_tensor(tensor: Tensor) -> Tensor:
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, tensor.requires_grad)
        return empty

    def of(part: Any) -> Any:
        if id(part) not in made and isinstance(part, Tensor):
            made[id(part)] = of_tensor(part)
        elif id(part) not in made:
            made[id(part)] = copy = nn.Module.__new__(type(part))
            copy.__dict__.update(part.__dict__)
            for kind in _KINDS:
                held = part.__dict__[kind].items()
                copy.__dict__[kind] = {k: None if x is None else of(x) for k, x in held}
        return made[id(part)]

    found: nn.Module = of(model)
    return found


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Where an error ends what is done inside, modules are again of the class and hold what they
    did before; what was written into a tensor stays."""
    before = [
        (part, type(part), dict(part.__dict__), {k: dict(part.__dict__[k]) for k in _KINDS})
        for part in model.modules()
        if not isinstance(part, torch.jit.ScriptModule)  # which nothing changes
    ]
    try:
        yield
    except BaseException:
        for part, kind, own, held in before:
            part.__class__ = kind
            part.__dict__.clear()
            part.__dict__.update(own)
            for name, values in held.items():  # hooks and optimizers may hold these dictionaries
                part.__dict__[name].clear()
                part.__dict__[name].update(values)
        raise
