"""AdamW: torch's fused kernel, or LeZero's with an exact fp32 master of each bf16 weight.

Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lezero.core.errors import ConfigError
from lezero.optim.side_by_side import side_by_side
from lezero.optim.weights import (
    Masters,
    WeightOptimizer,
    check_options,
    check_parameters,
    checked_masters,
    listed,
)


class AdamW(WeightOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` on its fused implementation, one pass over memory a step.

    `params` as in torch, or a module: then norms, biases and embeddings are not decayed.

    `masters` says how parameters in bf16 keep an fp32 value, to which small steps are added:

    - "none": not at all; steps below half a unit in the last place are lost.
    - "fp32": in the state, as `master`.
    - "remainder": as the 16 bits that the weight lacks, `remainder`; two bytes a parameter less,
      and bit for bit the same training.

    With masters a step equals that of torch's fused CPU kernel on the fp32 master, bit for bit (but
    see `ops/adamw/reference.py`), and state loads from each of the three into the others, but
    with masters not into "none", where they would be lost (`ConfigError`).
    `masters(model)` gives the fp32 values. Raises `ConfigError` when nothing is trainable, for
    values out of range, for options of torch that there are not with masters, and for "remainder"
    where no parameter is bf16.
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
        **options: Any,
    ) -> None:
        self._masters = checked_masters(masters)
        check_options(lr, betas, eps, weight_decay)
        found = listed(params, weight_decay, "AdamW")
        if masters == "none":
            if options.keys().isdisjoint({"fused", "foreach", "capturable", "differentiable"}):
                options["fused"] = _fusable(found)
        elif given := sorted(key for key, value in options.items() if value):
            raise ConfigError(
                f"AdamW: '{given[0]}' is not known with masters='{masters}'; leave it out, or use "
                "masters='none'"
            )
        torch.optim.AdamW.__init__(self, found, lr, betas, eps, weight_decay, **options)
        if masters != "none":
            check_parameters(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._masters == "none":
            with side_by_side(self):
                _torch_step(self)
        else:
            self._step_all()
        return loss


def _torch_step(optimizer: AdamW) -> None:
    """torch's own step without the hooks that torch wraps round it: they run round ours."""
    step: Any = torch.optim.AdamW.step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    step(optimizer)


def _fusable(params: list[Any]) -> bool:
    inner = [item["params"] if isinstance(item, dict) else [item] for item in params]
    flat = [item[1] if isinstance(item, tuple) else item for items in inner for item in items]
    kinds = {"cpu", "cuda", "xpu", "mps"}
    return all(p.is_floating_point() and p.device.type in kinds for p in flat)
