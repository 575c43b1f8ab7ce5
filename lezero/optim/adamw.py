"""AdamW: torch's, with the fused kernel where the parameters allow it.

Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lezero.core.errors import ConfigError
from lezero.optim.groups import parameter_groups


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` on its fused implementation, one pass over memory a step.

    `params` as in torch, or a module: then norms, biases and embeddings are not decayed.
    Raises `ConfigError` when nothing is trainable.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **options: Any,
    ) -> None:
        if isinstance(params, nn.Module):
            params = parameter_groups(params, weight_decay)
        listed = list(params)
        if not listed:
            raise ConfigError("AdamW: the model has no trainable parameter (all are frozen?)")
        if options.keys().isdisjoint({"fused", "foreach", "capturable", "differentiable"}):
            options["fused"] = _fusable(listed)
        super().__init__(listed, lr, betas, eps, weight_decay, **options)


def _fusable(params: list[Any]) -> bool:
    flat = [p for item in params for p in _tensors(item)]
    kinds = {"cpu", "cuda", "xpu", "mps"}
    return all(p.is_floating_point() and p.device.type in kinds for p in flat)


def _tensors(item: Any) -> list[torch.Tensor]:
    if isinstance(item, dict):
        inner = item["params"]
        return [inner] if isinstance(inner, torch.Tensor) else list(inner)
    if isinstance(item, tuple):
        return [item[1]]
    return [item]
