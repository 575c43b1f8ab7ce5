"""What keeps a job alive: several ranks started together, restarted together when one dies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lezero.elastic.launcher import LaunchConfig, launch, restarts

__all__ = ["LaunchConfig", "launch", "restarts"]


def __getattr__(name: str) -> Any:
    # The worker's first steps import this package: they must not wait for what launching needs.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("lezero.elastic.launcher"), name)
