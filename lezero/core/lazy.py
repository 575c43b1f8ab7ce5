"""Names that are imported on first use, so that `import lezero` stays light."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """`__getattr__` and `__dir__` for `package`, from a table of name → module that has it.

    A name that maps to a module ending in itself (`"nn": "lezero.nn"`) gives the module.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module = importlib.import_module(names[name])
        value = module if names[name].endswith(f".{name}") else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*names, *vars(sys.modules[package])})

    return get, listing
