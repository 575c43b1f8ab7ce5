"""The versions of modules, which a `state_dict` carries beside its tensors.

Modules that changed what they save convert older states by it (torch's `_version` and
`_load_from_state_dict`); a plain dictionary says nothing, which torch takes for the oldest state
there was. Files of tensors do not hold them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

Versions = Mapping[str, Mapping[str, Any]]


def versions_in(state: Mapping[str, Any]) -> Versions | None:
    """By name of module; None where `state` does not carry them, or something else instead."""
    found = getattr(state, "_metadata", None)
    if not isinstance(found, Mapping):
        return None
    known = all(isinstance(x, str) and isinstance(about, Mapping) for x, about in found.items())
    return found if known else None


def versions_of(module: nn.Module) -> Versions:
    """Those that its `state_dict()` carries."""
    modules = module.named_modules(remove_duplicate=False)
    return {name: {"version": part._version} for name, part in modules}


def versioned(state: Mapping[str, Any], versions: Versions | None) -> dict[str, Any]:
    """`state` with these for `load_state_dict`, which writes to what it is given."""
    made: Any = OrderedDict(state)
    if versions is not None:
        made._metadata = OrderedDict((name, dict(about)) for name, about in versions.items())
    found: dict[str, Any] = made
    return found
