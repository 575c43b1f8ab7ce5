"""What a skipped step must not leave behind besides gradients: buffers that its forward pass wrote,
and frozen parameters.

One batch with a NaN in it makes the running mean of a BatchNorm NaN for ever, while the losses of
training stay finite: only evaluation, and every checkpoint, would show it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lezero.nn.buffers import BufferSnapshot
from lezero.nn.frozen_writes import Named

_LARGEST_BYTES = 4 << 20


class MovingBuffers:
    """The buffers that steps change, as they were before this one.

    Candidates are dense floating-point buffers of at most 4 MiB and single numbers, those that are
    part of the state dict. What stayed as it was in a step is copied again only after something
    wrote to it, so a model without running statistics pays for one step's copies. Once written to
    it counts as moving: DDP writes every buffer onto itself at each forward pass, and comparing
    values makes the host wait for an accelerator, where copying does not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._moving: set[tuple[nn.Module, str]] = set()
        self._still: dict[tuple[nn.Module, str], tuple[Tensor | None, int]] = {}
        self._before: BufferSnapshot | None = None
        self._frozen: list[Named] = []

    def watch(self, frozen: Iterable[Named]) -> None:
        """Takes the frozen parameters that forward passes write, of at most 4 MiB, for moving."""
        for module, name in frozen:
            parameter = module._parameters[name]
            if parameter is not None and parameter.nbytes <= _LARGEST_BYTES:
                self._frozen.append((module, name))
        self._moving.update(self._frozen)

    def keep(self) -> None:
        """Before the first forward pass of a step."""
        self._before = BufferSnapshot(self._model, self._may_move, self._frozen)

    def put_back(self) -> None:
        """After a step that is skipped."""
        if self._before is not None:
            self._before.restore()

    def settle(self) -> None:
        """After a step that counts."""
        for kept in self._before.kept if self._before is not None else ():
            key = kept.module, kept.name
            if key in self._moving:
                continue
            if key not in self._still and kept.unchanged():
                self._still[key] = kept.buffer, _version(kept.buffer)
            else:
                self._moving.add(key)
        self._before = None

    def _may_move(self, module: nn.Module, name: str) -> bool:
        if name in module._non_persistent_buffers_set:
            return False
        buffer = module._buffers[name]
        if buffer is not None and buffer.layout is not torch.strided:
            return False  # few operations know sparse tensors
        if (module, name) in self._moving:
            return True
        seen = self._still.get((module, name))
        if seen is not None and seen[0] is buffer and seen[1] == _version(buffer):
            return False
        if buffer is None or buffer.numel() == 1:
            return True
        return buffer.is_floating_point() and buffer.nbytes <= _LARGEST_BYTES


def _version(buffer: Tensor | None) -> int:
    return 0 if buffer is None or buffer.is_inference() else buffer._version
