"""What modules note beside their buffers, and what of these belongs to it.

A table that grows with the longest sequence has the length that it was made for beside it, in a
plain attribute. A short table that is put back without its length is taken for the long one; and
the length cannot go back without all else that the module noted: lists, caches, layers that were
made in the first call. So tables that a pass replaced stay where it changed the notes beside them.
A training step that is skipped is another matter: it may have replaced a running mean, and counted
batches beside it. What has the size that it had goes back then.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_TORCHS = frozenset(vars(nn.Module()))  # `training`, and the tables and hooks of every module
_OURS = "_lezero"  # what LeZero itself keeps on a model: which verbs were applied
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.generic)
_MOST = 16  # of a list or dict, which may be a history that grows with each call
_DEEPEST = 2
_NOTHING = object()


class Notes:
    """The plain attributes of modules as they are now: values, tensors of one number, and lists,
    tuples, dicts and sets of these."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept = {module: _plain(module) for module in dict.fromkeys(modules)}

    def changed(self) -> set[nn.Module]:
        """The modules that note something else by now; where a note is a number on an accelerator,
        the host waits for it."""
        return {module for module, own in self._kept.items() if not _same(own, _plain(module))}


def goes_with_notes(
    now: Tensor | None, before: Tensor | None, size: torch.Size | None, training: bool = False
) -> bool:
    """Whether what a module that noted something else has `now` is a table that changed with it.

    before, size: the tensor that was there, and the size that it had. training: in a training step.
    """
    resized = (None if now is None else now.shape) != size
    return resized or (now is not before and not training)


class _Number:
    """A tensor of one number. It is compared when somebody asks, and not copied: a training step
    takes notes, and must not wait for an accelerator."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, _version(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Number) or self.version != _version(self.tensor):
            return False
        return self.tensor is other.tensor or torch.equal(self.tensor, other.tensor)

    __hash__ = None  # type: ignore[assignment]


def _plain(module: nn.Module) -> dict[str, Any]:
    own = ((n, x) for n, x in vars(module).items() if n not in _TORCHS and not n.startswith(_OURS))
    return {n: note for n, x in own if (note := _noted(x)) is not _NOTHING}


def _noted(x: Any, depth: int = 0) -> Any:
    """What can be compared later; `_NOTHING` where `x` is no note."""
    if isinstance(x, _VALUES):
        return x
    if isinstance(x, Tensor):
        return _Number(x) if x.numel() == 1 and not x.requires_grad else _NOTHING
    if isinstance(x, list | tuple | dict | set) and depth < _DEEPEST:
        first = islice(x.items() if isinstance(x, dict) else x, _MOST)
        return len(x), *(_noted(each, depth + 1) for each in first)
    return _NOTHING


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    try:
        return some.keys() == others.keys() and all(_equal(x, others[n]) for n, x in some.items())
    except (RuntimeError, ValueError, TypeError):  # numbers of another type, or without values
        return False


def _equal(some: Any, other: Any) -> bool:
    if some is other:
        return True
    if isinstance(some, tuple) and isinstance(other, tuple):
        return len(some) == len(other) and all(map(_equal, some, other))
    # NumPy would compare its number with each of a tuple.
    return not isinstance(some, tuple) and not isinstance(other, tuple) and bool(some == other)
