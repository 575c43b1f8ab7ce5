"""What modules note beside their buffers, and whether a pass has changed it.

A table that grows with the longest sequence has the length that it was made for beside it, in a
plain attribute. A short table that is put back without its length is taken for the long one; and
the length cannot go back without all else that the module noted: lists, caches, layers that were
made in the first call. So tables that a pass replaced stay where it changed the notes beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_PLAIN = frozenset(
    (bool, int, float, complex, str, bytes, tuple, type(None), torch.dtype, torch.device)
)


class Notes:
    """The plain attributes of modules, `training` apart, as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept = {module: _plain(module) for module in modules}

    def changed(self) -> set[nn.Module]:
        """The modules that note something else by now."""
        return {module for module, own in self._kept.items() if not _same(own, _plain(module))}


def _plain(module: nn.Module) -> dict[str, Any]:
    return {n: x for n, x in vars(module).items() if type(x) in _PLAIN and n != "training"}


def _same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    try:
        equal = (x is others[n] or x == others[n] for n, x in some.items())
        return some.keys() == others.keys() and all(equal)
    except (RuntimeError, ValueError, TypeError):  # tensors in a tuple: whether they are equal
        return False
