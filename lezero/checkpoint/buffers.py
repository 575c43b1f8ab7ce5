"""Host memory that checkpoints are copied into: allocated once, used for every save.

Copying into memory that is there already is several times faster than into fresh memory, and this
copy is the only time that training stands still for a save.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from lezero.core import device
from lezero.files import check_tensor, empty_bytes, split_shared

_ALIGN = 64


class HostBuffers:
    """One flat block of host memory (pinned beside an accelerator) and the views into it."""

    def __init__(self) -> None:
        self._signature: tuple[object, ...] = ()
        self._views: dict[str, Tensor] = {}

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocates and touches the memory for `tensors`, unless it is there already."""
        plain, _ = split_shared({n: check_tensor(n, t) for n, t in tensors.items()})
        self._prepare(plain)

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values of `tensors` as they are now, in host memory that the next copy overwrites.

        Names that share memory exactly share it in the copy too. Raises `FileError` naming a
        tensor that cannot be stored.
        """
        plain, same = split_shared({n: check_tensor(n, t) for n, t in tensors.items()})
        self._prepare(plain)
        with torch.no_grad():
            for name, tensor in plain.items():
                self._views[name].copy_(tensor, non_blocking=True)
        device.synchronize(tensor.device for tensor in plain.values())
        return {name: self._views[same.get(name, name)] for name in tensors}

    def _prepare(self, plain: Mapping[str, Tensor]) -> None:
        signature = tuple((n, t.dtype, t.shape, t.device.type) for n, t in plain.items())
        if signature == self._signature:
            return
        self._signature, self._views = (), {}
        begins, size = {}, 0
        for name, tensor in plain.items():
            begins[name] = size
            size += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        flat = _block(size, pinned=any(t.device.type != "cpu" for t in plain.values()))
        flat.zero_()
        for name, tensor in plain.items():
            count = tensor.numel() * tensor.element_size()
            part = flat[begins[name] : begins[name] + count]
            self._views[name] = part.view(tensor.dtype).view(tensor.shape)
        self._signature = signature


def _block(size: int, pinned: bool) -> Tensor:
    """Pinned memory takes device copies at full speed; plain memory where there is none."""
    if pinned:
        with suppress(RuntimeError):
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    return empty_bytes(size)[0]
