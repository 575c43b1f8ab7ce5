"""What a model keeps of the runs that it saw: what calibration left there is taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lezero.compress.quantize.journal import mode_of
from lezero.compress.quantize.spill import Spill
from lezero.compress.quantize.tensors import is_dense, same_bits
from lezero.nn.attributes import Notes, goes_with_notes


@contextmanager
def kept_buffers(model: nn.Module, spill: Spill) -> Iterator[None]:
    """Counters, caches and the like are afterwards what they were, whatever happens inside: values
    of buffers, and names without a tensor (of buffers and plain attributes). But for tables that
    changed together with what their module notes beside them (`Notes`)."""
    modules = list(model.modules())
    held = [
        (module, name, buffer)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and _has_values(buffer)
    ]
    for _, _, buffer in held:
        if ("buffer", id(buffer)) not in spill:
            spill.put(("buffer", id(buffer)), buffer)
    notes, empty = Notes(modules), [_Empty(module) for module in modules]
    try:
        yield
    finally:
        kinds = {each.module: each.kind for each in empty}
        attributes = [(each.module, each.clear_attributes()) for each in empty]
        changed = notes.changed()
        for module, came in attributes:
            if module in changed:
                vars(module).update(came)
        for each in empty:
            if each.module not in changed:
                each.clear_buffers()
        for module, name, buffer in held:
            # A script's table has no `get`.
            now = module._buffers[name] if name in module._buffers else None  # noqa: SIM401
            before = spill.get(("buffer", id(buffer)))
            if module in changed and goes_with_notes(now, buffer, before.shape):
                continue
            with torch.no_grad(), mode_of(buffer):
                _give_back(buffer, before)
            if now is not None or type(module) is kinds[module]:
                module._buffers[name] = buffer


class _Empty:
    """The names of a module under which there is no tensor yet, in its buffers and its plain
    attributes: those of None, and all that are not there. One that LeZero gave another class has
    what is new from it."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.kind = module, type(module)
        self._buffers = {name: x is None for name, x in module._buffers.items()}
        self._attributes = {name: x is None for name, x in vars(module).items()}
        self._not_saved = {*module._non_persistent_buffers_set}

    def clear_attributes(self) -> dict[str, Tensor]:
        """Returns what came into plain attributes, which have none again."""
        return self._cleared(vars(self.module), self._attributes)

    def clear_buffers(self) -> None:
        self._cleared(self.module._buffers, self._buffers)
        if type(self.module) is self.kind:
            vars(self.module)["_non_persistent_buffers_set"] = self._not_saved

    def _cleared(self, table: Any, before: dict[str, bool]) -> dict[str, Tensor]:
        if type(self.module) is not self.kind:
            return {}
        came = {n: x for n, x in table.items() if isinstance(x, Tensor) and before.get(n, True)}
        for name in came:
            if name in before:
                table[name] = None
            else:
                del table[name]
        return came


def _has_values(buffer: Tensor) -> bool:
    return is_dense(buffer) and not buffer.is_meta


def _give_back(buffer: Tensor, before: Tensor) -> None:
    """Values are compared, since torch does not count what is written through `.data`."""
    if buffer.shape != before.shape:
        buffer.data = before
    elif not same_bits(buffer, before):
        buffer.copy_(before)
