"""Evaluation mode for a while, whatever modules do when their mode is changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


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
