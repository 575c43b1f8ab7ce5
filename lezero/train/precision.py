"""Precision of a run: which dtype the matrix products use, and loss scaling where fp16 needs it.

Parameters and optimizer state, of fp32, keep their type in every precision, so that it can change
in mid-run and nothing else has to: `fp32` computes plainly, `bf16` and `fp16` under
`torch.autocast`, `fp16` with a dynamic loss scale on top (Micikevicius et al., "Mixed Precision
Training", 2018). A sharded model has 16-bit copies of its parameters already: then bf16 is
`lz.Zero(compute="bf16")`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import nn

from lezero.core import device, groups
from lezero.core.decisions import Decisions
from lezero.core.errors import ConfigError
from lezero.core.facts import instruction_sets
from lezero.core.log import logger
from lezero.optim.weights import WeightOptimizer
from lezero.parallel.zero import sharding_of
from lezero.profiler.products import product_seconds

log = logger("train")
Name = Literal["auto", "fp32", "bf16", "fp16"]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NATIVE_BF16 = {"amx_bf16", "avx512_bf16", "bf16", "sve_bf16"}


def resolve(name: str, place: torch.device, decisions: Decisions, step: int = 0) -> str:
    """The precision to use: the user's, or from device facts for "auto"; a recorded decision.

    auto is bf16 where the hardware multiplies it natively (AMX or AVX512-BF16, an accelerator of
    compute capability 8 or more), fp16 on older GPUs, fp32 elsewhere. On a processor both are
    measured, since not each that has instructions for bf16 is faster with them.
    """
    if name not in get_args(Name):
        raise ConfigError(f"precision: got '{name}', allowed is {', '.join(get_args(Name))}")
    if name != "auto":
        return decisions.record("precision", name, overridden=True, reason="given", step=step)
    if place.type == "cpu":
        native = sorted(_NATIVE_BF16 & set(instruction_sets()))
        if native and "precision" not in decisions.replay:
            return _faster(native[0], decisions, step)
        found, reason = "fp32", "no bf16 unit"  # or what is replayed
    else:
        version = device.capability()
        if version is None or version >= (8, 0):
            found, reason = "bf16", f"native bf16 on {place.type} {version or ''}".strip()
        else:
            found, reason = "fp16", f"compute capability {version[0]}.{version[1]} has no bf16"
    return decisions.record("precision", found, reason=reason, step=step)


def _faster(native: str, decisions: Decisions, step: int) -> str:
    """bf16, unless products in fp32 take a tenth less on this processor."""

    def measure(name: str) -> Callable[[], float]:
        return lambda: product_seconds()[name]

    return decisions.choose(
        "precision",
        {name: measure(name) for name in ("bf16", "fp32")},
        unit="s a product",
        why=f"products of matrices timed in both; native bf16: {native}",
        keep="bf16",
        margin=0.1,
        step=step,
    )


def resolve_plain(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    decisions: Decisions,
    step: int = 0,
) -> str:
    """The precision of a model that is not sharded; recorded once its weights can be trained so."""
    _check_weights(model, optimizer, decisions)
    return resolve(name, next(model.parameters()).device, decisions, step)


def _check_weights(
    model: nn.Module, optimizer: torch.optim.Optimizer, decisions: Decisions
) -> None:
    """Raises `ConfigError` for weights in fp16 that the optimizer is to train: they lose small
    steps, and their second moments become zero. Warns, once, of those in bf16 without masters."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    kinds = {n: p.dtype for n, p in model.named_parameters() if id(p) in held}
    if half := [name for name, kind in kinds.items() if kind == torch.float16]:
        more = f", and {len(half) - 1} more are" if len(half) > 1 else ""
        raise ConfigError(
            f"precision: weights are trained in fp32 (or bf16 with masters), but '{half[0]}' is in "
            f"fp16{more}; call model.float() before the optimizer is made, whatever the precision"
        )
    bf16 = [name for name, kind in kinds.items() if kind == torch.bfloat16]
    masters = isinstance(optimizer, WeightOptimizer) and optimizer.keeps_masters
    if not bf16 or masters or "weights" in decisions.records:
        return
    more = f", as are {len(bf16) - 1} more" if len(bf16) > 1 else ""
    reason = f"'{bf16[0]}' is{more}, and the optimizer has no fp32 masters"
    decisions.record("weights", "bf16", reason=reason, fact=True)
    if groups.is_main():
        log.warning(
            "weights in bf16: %s that LeZero knows of, so steps smaller than 1/512 of a weight are "
            "lost; call model.float() before the optimizer is made, or use "
            "lz.optim.AdamW(model, masters='fp32')",
            reason,
        )


def resolve_sharded(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, decisions: Decisions
) -> str:
    """The precision of a sharded model: what `lz.Zero(compute=…)` made its parameters compute in.

    `ConfigError` when the user asks for another one.
    """
    _check_weights(model, optimizer, decisions)
    zero = sharding_of(model).config
    types = {zero.compute_dtype(parameter.dtype) for parameter in model.parameters()}
    found = "bf16" if torch.bfloat16 in types else "fp32"
    if name == "fp16" or torch.float16 in types:
        raise ConfigError(
            "precision: fp16 needs a loss scale, which a sharded model does not support; use bf16: "
            "lz.Zero(compute='bf16')"
        )
    if name == "auto":
        if "precision" in decisions.records:
            return found
        reason = "what the model was sharded to compute"
        return decisions.record("precision", found, reason=reason, fact=True)
    if name not in get_args(Name):
        raise ConfigError(f"precision: got '{name}', allowed is {', '.join(get_args(Name))}")
    if name != found:
        weights = ", the type of its weights" if zero.compute == "auto" else ""
        kept = " precision='auto', or" if weights else ""
        raise ConfigError(
            f"precision: got '{name}', but the model was sharded to compute in {found}{weights}; "
            f"use{kept} lz.shard_(model, lz.Zero(compute='{name}'))"
        )
    return decisions.record("precision", found, overridden=True, reason="given")


class Precision:
    """Autocast and loss scale of one precision on one kind of device.

    `cache`: whether autocast keeps the weights that it has cast until it ends. `scaler`: the state
    of a loss scale that fp16 had before and goes on with.
    """

    def __init__(
        self,
        name: str,
        place: torch.device,
        cache: bool = True,
        scaler: dict[str, Any] | None = None,
    ) -> None:
        self.name, self.place, self.cache = name, place, cache
        self.scaler, self._kept = self._new_scaler(), scaler or {}
        if self.name == "fp16" and self._kept:
            self.scaler.load_state_dict(self._kept)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context that a forward pass runs in."""
        dtype = _DTYPES.get(self.name)
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.place.type, dtype=dtype, cache_enabled=self.cache)

    def _new_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.place.type, enabled=self.name == "fp16")

    def forget_step(self) -> None:
        """Leaves a step that ended with an error: the next one begins with the same loss scale.

        torch's scaler refuses to unscale a second time until it was updated.
        """
        scaler = self._new_scaler()
        scaler.load_state_dict(self.scaler.state_dict())
        self.scaler = scaler

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def state(self) -> dict[str, Any]:
        """With the loss scale of fp16, also while another precision is in use."""
        scaler = self.scaler.state_dict() if self.name == "fp16" else self._kept
        return {"name": self.name, "scaler": scaler}

    def load_state(self, state: dict[str, Any]) -> None:
        self._kept = state["scaler"]
        self.scaler = self._new_scaler()  # that of a run which had none yet
        if self.name == "fp16" and self._kept:
            self.scaler.load_state_dict(self._kept)
