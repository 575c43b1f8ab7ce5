"""What a user says about ZeRO."""

from __future__ import annotations

from typing import Literal

import torch

from lezero.core.config import Config

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Zero(Config):
    """Which part of the training state each rank keeps.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
    (2020), section 5. Every rank gives the same.
    """

    stage: Literal[0, 1, 2, 3] = 2
    """0 splits nothing, 1 the optimizer state, 2 gradients too, 3 parameters too."""
    compute: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the parameters in forward and backward. auto: the type that each parameter has.
    bf16 on fp32 parameters: those are the masters, and only their 16-bit copies are gathered."""

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which a parameter of type `dtype` computes."""
        return _DTYPES.get(self.compute, dtype)
