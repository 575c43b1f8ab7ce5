"""Buffers that a model writes to as it runs: what calibration did to them is taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lezero.compress.quantize.spill import Spill


@contextmanager
def kept_buffers(model: nn.Module, spill: Spill) -> Iterator[None]:
    """Counters, caches and the like are afterwards what they were, whatever happens inside."""
    held = [
        (module, name, buffer, buffer._version)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and _is_counted(buffer)
    ]
    for _, _, buffer, _ in held:
        if ("buffer", id(buffer)) not in spill:
            spill.put(("buffer", id(buffer)), buffer)
    try:
        yield
    finally:
        for module, name, buffer, version in held:
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(spill.get(("buffer", id(buffer))))
            if module._buffers.get(name) is not None:
                module._buffers[name] = buffer


def _is_counted(buffer: Tensor) -> bool:
    """Whether it has values, and torch tells when they are written to."""
    return buffer.layout == torch.strided and not buffer.is_meta and not buffer.is_inference()
