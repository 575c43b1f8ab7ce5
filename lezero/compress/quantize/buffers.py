"""What a model keeps of the runs that it saw: what calibration left there is taken back."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lezero.compress.quantize.journal import Journal, mode_of
from lezero.compress.quantize.spill import Spill
from lezero.compress.quantize.tensors import (
    is_dense,
    kept_beside,
    overlaps,
    same_bits,
    sharing_memory,
)
from lezero.nn.attributes import Notes, goes_with_notes

# Of one parameter. A vocabulary's matrix that stays as it was is not read again from the disk.
_MOST_BYTES = 1 << 24


@contextmanager
def as_it_was(model: nn.Module, spill: Spill, weights: Collection[int]) -> Iterator[Journal]:
    """Counters, caches and the like are afterwards what they were, whatever happens inside: values
    of buffers and small parameters, and names without a tensor (of buffers and plain attributes).
    But for what changed together with what its module notes beside it (`Notes`; a tensor under such
    a name also with what a module around its own notes), and for what went through the journal.

    weights: ids of the parameters that are to be quantized.
    """
    modules = list(model.modules())
    journal = Journal(
        spill, sharing_memory([*model.parameters(), *model.buffers(), *kept_beside(model)])
    )
    held = [
        (module, name, buffer)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and _has_values(buffer)
    ]
    for _, _, buffer in held:
        if ("buffer", id(buffer)) not in spill:
            spill.put(("buffer", id(buffer)), buffer)
    parameters = [
        (module, parameter)
        for module in modules
        for parameter in module._parameters.values()
        if parameter is not None and id(parameter) not in weights and _is_small(parameter)
    ]
    for _, parameter in parameters:
        if ("parameter", id(parameter)) not in spill:
            spill.put(("parameter", id(parameter)), parameter.data)
    notes, empty = Notes(modules), [_Empty(module) for module in modules]
    try:
        yield journal
    finally:
        kinds = {each.module: each.kind for each in empty}
        attributes = [(each.module, each.clear_attributes()) for each in empty]
        changed = notes.changed()
        noted = {x for module in changed if type(module) is kinds[module] for x in module.modules()}
        noted |= changed
        for module, came in attributes:
            if module in noted:
                vars(module).update(came)
        for each in empty:
            if each.module not in noted:
                each.clear_buffers()
        for module, name, buffer in held:
            # A script's table has no `get`.
            now = module._buffers[name] if name in module._buffers else None  # noqa: SIM401
            before = spill.get(("buffer", id(buffer)))
            if module in changed and goes_with_notes(now, buffer, before.shape):
                continue
            with mode_of(buffer), torch.no_grad():
                _give_back(buffer, before)
            if now is not None or type(module) is kinds[module]:
                module._buffers[name] = buffer
        for module, parameter in parameters:
            if module not in changed and not journal.wrote(parameter):
                with mode_of(parameter), torch.no_grad():
                    _give_back(parameter, spill.get(("parameter", id(parameter))))


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


def _is_small(parameter: nn.Parameter) -> bool:
    """Whether it has values of its own that can be kept, and not too many of them."""
    if nn.parameter.is_lazy(parameter) or type(parameter.data) is not Tensor:
        return False
    plain = _has_values(parameter) and not overlaps(parameter)
    return plain and parameter.nbytes <= _MOST_BYTES


def _give_back(buffer: Tensor, before: Tensor) -> None:
    """Values are compared, since torch does not count what is written through `.data`."""
    if buffer.shape != before.shape:
        buffer.data = before
    elif not same_bits(buffer, before):
        buffer.copy_(before)
