"""A module's buffers, put back as they were after a pass that should leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lezero.nn.attributes import Notes, goes_with_notes
from lezero.nn.walk import modules_of

Named = tuple[nn.Module, str]
"""A module, and the name in it of a parameter or buffer of its own."""


@dataclass(frozen=True)
class KeptBuffer:
    """The buffer or parameter `name`, which a module has in `table`, and a copy of its value; None
    for a name without a tensor, and for what cannot be written in place."""

    name: str
    buffer: Tensor | None
    value: Tensor | None
    table: dict[str, Any]

    def goes_with_notes(self, training: bool) -> bool:
        kept = self.buffer if self.value is None else self.value
        # A script's table has no `get`.
        now = self.table[self.name] if self.name in self.table else None  # noqa: SIM401
        size = None if kept is None else kept.shape
        return goes_with_notes(now, self.buffer, size, training)

    def restore(self) -> None:
        self.table[self.name] = self.buffer
        if self.buffer is not None and self.value is not None:
            if self.buffer.shape != self.value.shape:
                self.buffer.resize_(self.value.shape)
            self.buffer.copy_(self.value)


class BufferSnapshot:
    """Copies of a module's buffers, of those alone for which `wanted(module, name)` is true, and of
    the parameters `frozen`.

    A forward pass may write into a buffer, resize it, or put another tensor in its place; each is
    undone by `restore`, but for tables that changed together with what the module notes beside
    them (`lezero.nn.attributes`), fewer of them where the pass is `training`. A buffer on the meta
    device, or without a size yet, has no values to keep.
    """

    def __init__(
        self,
        model: nn.Module,
        wanted: Callable[[nn.Module, str], bool] = lambda *_: True,
        frozen: Collection[Named] = (),
        training: bool = False,
    ) -> None:
        buffers = [
            (module, _kept(name, buffer, module._buffers))
            for module in modules_of(model)
            for name, buffer in module._buffers.items()
            if (buffer is None or not (buffer.is_meta or nn.parameter.is_lazy(buffer)))
            and wanted(module, name)
        ]
        self._notes, self._training = Notes(module for module, _ in buffers), training
        self._kept = buffers + [
            (module, _kept(name, module._parameters[name], module._parameters))
            for module, name in frozen
            if name in module._parameters and module._parameters[name] is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        changed = self._notes.changed()
        for module, each in self._kept:
            if module not in changed or not each.goes_with_notes(self._training):
                each.restore()


def _kept(name: str, value: Tensor | None, table: dict[str, Any]) -> KeptBuffer:
    copied = None if value is None or _lasting(value) else value.detach().clone()
    return KeptBuffer(name, value, copied, table)


def _lasting(tensor: Tensor) -> bool:
    """Whether torch refuses to write into it: an inference tensor, or an expanded one."""
    if tensor.is_inference():
        return True
    if tensor.layout is not torch.strided:
        return False
    return any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
