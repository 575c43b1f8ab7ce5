"""Modes for a while: evaluation, whatever modules do when theirs is changed, and not compiled."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

OWN_STATISTICS = (nn.modules.batchnorm._NormBase,)
"""Norms that compute with the batch's own statistics where they are in training mode."""

_lock = threading.Lock()
_blocks = 0
_switch: Any = None


@contextlib.contextmanager
def evaluating(model: nn.Module, but_for: tuple[type[nn.Module], ...] = ()) -> Iterator[None]:
    """The model in evaluation mode; afterwards each of its modules is in the mode that it had.

    but_for: modules of these kinds stay as they are where the model itself is in evaluation mode:
    somebody left them training.

    The flags are set, `eval()` and `train()` are not called: an override may do work, as adapters
    that merge their weights do, which `train()` of one part alone would not take back.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        kept = () if model.training else but_for
        for module, training in modes:
            module.training = training and isinstance(module, kept)
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled models and functions run as they are written, so that hooks see each module.

    torch has one such switch for the whole process: other threads run so too meanwhile, and the
    last of overlapping blocks gives back what was before the first.
    """
    global _blocks, _switch
    with _lock:
        if not _blocks:
            _switch = torch.compiler.set_stance("force_eager")
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks:
                _switch.__exit__(None, None, None)
