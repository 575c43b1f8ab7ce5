"""What a skipped step must not leave behind besides gradients: buffers that its forward pass wrote,
and frozen parameters.

One batch with a NaN in it makes the running mean of a BatchNorm NaN for ever, while the losses of
training stay finite: only evaluation, and every checkpoint, would show it.
"""

from __future__ import annotations

import torch
from torch import nn

from lezero.nn.buffers import BufferSnapshot, Named
from lezero.nn.walk import modules_of

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
        self._before = BufferSnapshot(self._model, self._may_move, self._moving, training=True)
        self._seen = {
            (module, name): mark
            for module in modules_of(self._model)
            for name, _ in module._parameters.items()  # a script's has no more than items
            if (mark := _mark(module, name)) is not None
        }

    def put_back(self) -> None:
        """After a step that is skipped, or raised."""
        if self._before is not None:
            self._before.restore()
        self._before = None

    def rewind(self) -> None:
        """Before another pass of the same step."""
        self.put_back()
        self.keep()

    def settle(self) -> None:
        """After a step that counts."""
        self._before = None
        self._moving.update(n for n, mark in self._seen.items() if _mark(*n) not in (mark, None))

    def _may_move(self, module: nn.Module, name: str) -> bool:
        if name in module._non_persistent_buffers_set:
            return False
        buffer = module._buffers[name]
        if buffer is None or buffer.layout is not torch.strided:
            return buffer is None  # few operations know sparse tensors
        small = buffer.is_floating_point() and buffer.nbytes <= _LARGEST_BYTES
        return small or buffer.numel() == 1


def _mark(module: nn.Module, name: str) -> tuple[int, int] | None:
    """What changes when a frozen parameter is written (other than through `.data`) or has another
    memory; None for one that is trained, gone, large or without values here."""
    p = module._parameters[name] if name in module._parameters else None  # noqa: SIM401
    if p is None or p.requires_grad or p.is_inference() or hasattr(p, "to_local"):
        return None
    if p.layout is not torch.strided or p.is_meta or p.nbytes > _LARGEST_BYTES:
        return None
    return p.data_ptr(), p._version
