"""How a unit learns that its module computes: the module's class gets a `__call__` around its own.

[Note: why a class and not hooks]
Hooks run inside `module.compile()` and would break its graph; a `__call__` lies around it. Names,
`isinstance` and `forward` stay as they were, and modules of one class stay of one class, so that
compiled code is shared by equal blocks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lezero.core.errors import OrderError
from lezero.parallel.zero.unit import UNIT, Unit

_classes: dict[type, type] = {}


class _Sharded:
    def __call__(self, *args: Any, **keywords: Any) -> Any:
        unit: Unit = self.__dict__[UNIT]
        args, keywords = unit.cast(args, keywords)
        unit.enter()
        output = None
        try:
            output = super().__call__(*args, **keywords)  # type: ignore[misc]
        finally:
            unit.leave(output)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise OrderError("a sharded model cannot be copied; copy it before lz.shard_")


def announce(module: nn.Module, unit: Unit) -> None:
    """Has calls of `module` go through `unit`."""
    kind = type(module)
    if kind not in _classes:
        body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _classes[kind] = type(kind.__name__, (_Sharded, kind), {**body, "__doc__": kind.__doc__})
    module.__dict__[UNIT] = unit
    module.__class__ = _classes[kind]
