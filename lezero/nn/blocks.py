"""The repeated blocks of a model: what is sharded, compiled or calibrated as one.

A block is a child of an `nn.ModuleList` or `nn.Sequential` that has modules inside, parameters, and
a sibling of the same class; the outermost such modules count. The rest of the model is one unit of
its own, the root. Parameters that two blocks share belong to the root.
"""

from __future__ import annotations

from collections import Counter

from torch import nn


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of every block, in the order of registration."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        repeated = _repeated(module)
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            if id(child) in seen:
                continue
            if type(child) in repeated and _is_block(child):
                seen.add(id(child))
                found.append((path, child))
            else:
                visit(path, child)

    visit("", model)
    return found


def _repeated(module: nn.Module) -> set[type]:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return set()
    counts = Counter(type(child) for child in module.children())
    return {kind for kind, count in counts.items() if count > 1}


def _is_block(module: nn.Module) -> bool:
    listed = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
    inside = next(iter(module.children()), None) is not None
    return not listed and inside and next(module.parameters(), None) is not None
