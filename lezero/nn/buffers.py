"""A module's buffers, put back as they were after a pass that should leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lezero.nn.frozen_writes import Named


@dataclass(frozen=True)
class KeptBuffer:
    """The buffer `name` of `module` and a copy of its value; None for a name without a tensor. Or a
    parameter: `table` is where the module has it."""

    module: nn.Module
    name: str
    buffer: Tensor | None
    value: Tensor | None
    table: dict[str, Any]

    def unchanged(self) -> bool:
        now = self.table.get(self.name)
        if now is not self.buffer:
            return False
        return now is None or self.value is None or torch.equal(now, self.value)

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
    undone by `restore`. A buffer on the meta device, or without a size yet, has no values to keep.
    """

    def __init__(
        self,
        model: nn.Module,
        wanted: Callable[[nn.Module, str], bool] = lambda *_: True,
        frozen: Collection[Named] = (),
    ) -> None:
        self.kept = [
            _kept(module, name, buffer, module._buffers)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if (buffer is None or not (buffer.is_meta or nn.parameter.is_lazy(buffer)))
            and wanted(module, name)
        ]
        self.kept += [
            _kept(module, name, module._parameters[name], module._parameters)
            for module, name in frozen
            if module._parameters.get(name) is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for each in self.kept:
            each.restore()


def _kept(module: nn.Module, name: str, value: Tensor | None, table: dict[str, Any]) -> KeptBuffer:
    copied = None if value is None else value.detach().clone()
    return KeptBuffer(module, name, value, copied, table)
