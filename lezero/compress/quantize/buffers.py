"""Buffers that a model writes to as it runs: what calibration did to them is taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lezero.compress.quantize.journal import mode_of
from lezero.compress.quantize.spill import Spill
from lezero.compress.quantize.tensors import is_dense, same_bits
from lezero.nn.attributes import Notes, goes_with_notes


@contextmanager
def kept_buffers(model: nn.Module, spill: Spill) -> Iterator[None]:
    """Counters, caches and the like are afterwards what they were, whatever happens inside; but for
    tables that changed together with what their module notes beside them (`Notes`)."""
    held = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and _has_values(buffer)
    ]
    for _, _, buffer in held:
        if ("buffer", id(buffer)) not in spill:
            spill.put(("buffer", id(buffer)), buffer)
    notes = Notes(module for module, _, _ in held)
    try:
        yield
    finally:
        changed = notes.changed()
        for module, name, buffer in held:
            # A script's table has no `get`.
            now = module._buffers[name] if name in module._buffers else None  # noqa: SIM401
            before = spill.get(("buffer", id(buffer)))
            if module in changed and goes_with_notes(now, buffer, before.shape):
                continue
            with torch.no_grad(), mode_of(buffer):
                _give_back(buffer, before)
            if now is not None:
                module._buffers[name] = buffer


def _has_values(buffer: Tensor) -> bool:
    return is_dense(buffer) and not buffer.is_meta


def _give_back(buffer: Tensor, before: Tensor) -> None:
    """Values are compared, since torch does not count what is written through `.data`."""
    if buffer.shape != before.shape:
        buffer.data = before
    elif not same_bits(buffer, before):
        buffer.copy_(before)
