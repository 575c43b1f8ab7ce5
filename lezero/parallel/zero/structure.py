"""Whether a model still has the parameters that `lz.shard_` found, and no others.

A module that is put into a sharded model later has parameters of each rank's own, whose gradients
nobody sums: the ranks would become different models. Modules can change in ways of which torch
tells nobody (`ModuleList.insert`), so all are looked at where a forward or a step begins, which
takes about half a microsecond a module.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.tensor import DTensor

from lezero.core.errors import OrderError
from lezero.parallel.zero.held import HELD


class Structure:
    """`places` are all (module, attribute) of parameters when `model` was sharded."""

    def __init__(self, model: nn.Module, places: Iterable[tuple[nn.Module, str]]) -> None:
        self._model = model
        self._kept = list(places)  # so that no other module gets the id of one
        self._known: dict[int, set[str]] = {}
        for module, attribute in self._kept:
            self._known.setdefault(id(module), set()).add(attribute)

    def check(self) -> set[int]:
        """Raises `OrderError` for a parameter in a new place; returns the `id` of every module.

        What lies where a parameter was is looked at by its unit (`Unit.check`).
        """
        seen: set[int] = set()
        waiting: list[nn.Module | None] = [self._model]
        while waiting:
            module = waiting.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            if module._parameters and self._strange(module):
                self._refuse()
            if module._modules:
                waiting += module._modules.values()
        return seen

    def _strange(self, module: nn.Module) -> str:
        """The attribute that holds a parameter in a new place; "" for none. One that is split is
        the model's under another name, or of a model with a sharding of its own."""
        known = self._known.get(id(module), ())
        for name, parameter in module._parameters.items():
            if parameter is None or name in known:
                continue
            if not hasattr(parameter, HELD) and not isinstance(parameter, DTensor):
                return name
        return ""

    def _refuse(self) -> None:
        named = ((path, self._strange(module)) for path, module in self._model.named_modules())
        name = next(f"{path}.{attribute}" for path, attribute in named if attribute)
        raise OrderError(
            f"parameter '{name.lstrip('.')}' is not sharded: its module was added or replaced "
            "after lz.shard_, so that each rank would train a value of its own; change modules "
            "before lz.shard_, or copy values into the parameters that are there"
        )
