"""AdamW whose moments take one byte each.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021), arXiv:2110.02861; the code
and the blocks are told in `lezero/ops/adamw/eight_bit.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lezero.optim.weights import (
    Masters,
    WeightOptimizer,
    check_options,
    check_parameters,
    checked_masters,
    listed,
)


class AdamW8bit(WeightOptimizer):
    """AdamW with both moments in 8 bits: 2 bytes a parameter and 8 for each block of 256.

    `params` (fp32 or bf16) and `masters` as in `AdamW`. Moments are read, updated in fp32 and
    written back in one pass. A block is up to 256 neighbouring elements of a row, so that a step
    gives the same bits however the rows are shared among ranks; a DTensor parameter must be
    Shard(0). Parameters of fewer than 4096 elements, or with rows shorter than 64, keep moments in
    fp32. A gradient that is not finite turns its block into NaN.

    Raises `ConfigError` when nothing is trainable, for other types, and for values out of range.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        masters: Masters = "none",
    ) -> None:
        self._masters, self._eight_bit = checked_masters(masters), True
        check_options(lr, betas, eps, weight_decay)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(listed(params, weight_decay, "AdamW8bit"), options)
        check_parameters(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all()
        return loss
