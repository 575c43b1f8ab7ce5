"""What modules note beside their buffers, put back with these.

A table that grows with the longest sequence has the length that it was made for beside it, in a
plain attribute: a short table that is put back without its length is taken for the long one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, tuple, Tensor, torch.dtype, torch.device)


class AttributeSnapshot:
    """The plain attributes of modules, by name: numbers, strings, tuples, tensors and None. Modes
    (`training`) are not among them, and of tensors it is the objects, not the values.

    A module that has become one of another class meanwhile is left alone by `restore`.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept = [(m, type(m), set(vars(m)), _plain(m)) for m in modules]

    def tensors(self) -> list[Tensor]:
        return [x for *_, own in self._kept for x in own.values() if isinstance(x, Tensor)]

    def restore(self) -> None:
        for module, kind, names, own in self._kept:
            if type(module) is not kind:
                continue
            for name in _plain(module):
                if name not in names:
                    del module.__dict__[name]
            module.__dict__.update(own)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if (value is None or isinstance(value, _PLAIN)) and name != "training"
    }
