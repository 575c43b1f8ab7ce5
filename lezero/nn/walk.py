"""Walks over a model that every training step takes.

`Module.modules()` and `parameters()` descend through a generator a level and make up names that
nobody reads here: of 200 parameters that is 0.2 to 0.3 ms a walk, and a step needs several.
"""

from __future__ import annotations

from torch import nn

_MODULES = ("modules", "named_modules")
_PARAMETERS = ("zero_grad", "parameters", "named_parameters", "_named_members")


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The model and every module in it, once; those nearer to it first, unless a class tells its
    modules by itself."""
    found, seen = [model], {model}
    for module in found:  # which grows meanwhile
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    if any(_has_own(kind, *_MODULES) for kind in set(map(type, found))):
        return list(model.modules())
    return found


def drop_gradients(model: nn.Module) -> None:
    """As `model.zero_grad(set_to_none=True)`."""
    if _has_own(type(model), *_PARAMETERS):
        model.zero_grad(set_to_none=True)
        return
    for module in modules_of(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.grad = None


def _has_own(kind: type[nn.Module], *names: str) -> bool:
    """Whether a class has one of these methods other than torch's."""
    return any(getattr(kind, name) is not getattr(nn.Module, name) for name in names)
