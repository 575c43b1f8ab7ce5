"""Modes for a while: evaluation, whatever modules do when theirs is changed, and not compiled."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_lock = threading.Lock()
_blocks = 0
_switch: Any = None


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards each of its modules is in the mode that it had.

    The flags are set, `eval()` and `train()` are not called: an override may do work, as adapters
    that merge their weights do, which `train()` of one part alone would not take back.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
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
