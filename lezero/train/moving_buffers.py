"""What a skipped step must not leave behind besides gradients: buffers that its forward pass wrote,
and frozen parameters.

One batch with a NaN in it makes the running mean of a BatchNorm NaN for ever, while the losses of
training stay finite: only evaluation, and every checkpoint, would show it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lezero.nn.buffers import BufferSnapshot, Named

_LARGEST_BYTES = 4 << 20


class MovingBuffers:
    """The buffers and frozen parameters that steps change, as they were before this one.

    Buffers: dense floating-point ones of at most 4 MiB and single numbers, those that are part of
    the state dict. Frozen parameters (a codebook, a teacher's moving average) may be a whole model,
    so those alone are kept that an earlier step has written, of at most 4 MiB as well.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: BufferSnapshot | None = None
        self._seen: dict[Named, tuple[int, int]] = {}
        self._moving: set[Named] = set()

    def keep(self) -> None:
        """Before the first forward pass of a step."""
        self._before = BufferSnapshot(self._model, self._may_move, self._moving)
        self._seen = dict(self._marks())

    def put_back(self) -> None:
        """After a step that is skipped, or raised."""
        if self._before is not None:
            self._before.restore()
        self._before = None

    def settle(self) -> None:
        """After a step that counts."""
        self._before = None
        self._moving.update(n for n, mark in self._marks() if self._seen.get(n, mark) != mark)

    def _marks(self) -> Iterator[tuple[Named, tuple[int, int]]]:
        """What changes when a frozen parameter is written (other than through `.data`) or has
        another memory."""
        for module in self._model.modules():
            for name, p in module._parameters.items():
                if p is None or p.requires_grad or p.is_inference() or hasattr(p, "to_local"):
                    continue
                if p.layout is torch.strided and not p.is_meta and p.nbytes <= _LARGEST_BYTES:
                    yield (module, name), (p.data_ptr(), p._version)

    def _may_move(self, module: nn.Module, name: str) -> bool:
        if name in module._non_persistent_buffers_set:
            return False
        buffer = module._buffers[name]
        if buffer is None or buffer.layout is not torch.strided:
            return buffer is None  # few operations know sparse tensors
        small = buffer.is_floating_point() and buffer.nbytes <= _LARGEST_BYTES
        return small or buffer.numel() == 1
