"""What a model writes as it runs, buffers and attributes: what calibration did is taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lezero.compress.quantize.journal import mode_of
from lezero.compress.quantize.spill import Spill
from lezero.compress.quantize.tensors import is_dense, overlaps, same_bits, sharing_memory
from lezero.nn.attributes import AttributeSnapshot


@contextmanager
def kept_buffers(model: nn.Module, spill: Spill) -> Iterator[None]:
    """Counters, caches and the like are afterwards what they were, whatever happens inside."""
    held = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and _has_values(buffer)
    ]
    attributes = AttributeSnapshot(model.modules())
    written = {id(buffer): buffer for _, _, buffer in held}
    written |= {id(x): x for x in _apart(attributes.tensors(), model)}
    for key, tensor in written.items():
        spill.put(("buffer", key), tensor)
    try:
        yield
    finally:
        for key, tensor in written.items():
            with torch.no_grad(), mode_of(tensor):
                _give_back(tensor, spill.get(("buffer", key)))
        for module, name, buffer in held:
            if module._buffers.get(name) is not None:
                module._buffers[name] = buffer
        attributes.restore()


def _apart(tensors: list[Tensor], model: nn.Module) -> list[Tensor]:
    """Those with values of their own: what is a weight, or a view of one, is changed on purpose."""
    others = [*model.parameters(), *model.buffers()]
    taken = {id(x) for x in others} | sharing_memory([*others, *tensors])
    plain = (x for x in tensors if type(x) is Tensor and id(x) not in taken)
    return [x for x in plain if _has_values(x) and not overlaps(x)]


def _has_values(tensor: Tensor) -> bool:
    return is_dense(tensor) and not tensor.is_meta


def _give_back(tensor: Tensor, before: Tensor) -> None:
    """Values are compared, since torch does not count what is written through `.data`."""
    if tensor.shape != before.shape:
        tensor.data = before
    elif not same_bits(tensor, before):
        tensor.copy_(before)
