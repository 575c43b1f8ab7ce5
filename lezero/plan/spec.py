"""What one training step looks like, as far as a forecast has to know."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lezero.comm.probe import Level
from lezero.comm.wire import Wire
from lezero.core.errors import ConfigError
from lezero.ops.cross_entropy import cross_entropy_sum
from lezero.ops.cross_entropy.reference import IGNORED
from lezero.parallel.zero import Zero

Build = Callable[[], nn.Module]
Loss = Callable[[nn.Module, Any], torch.Tensor]
Inputs = Callable[[int, int], Any]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMS = ("eager", "blocks", "step")
ATTENTIONS = ("auto", "torch", "lezero")


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One optimizer step of one rank.

    batch: samples in a micro-batch of this rank. tokens: length of a sample. accumulate:
    micro-batches a step. precision: "fp32", "bf16" or "fp16" (autocast; parameters stay fp32).
    form: "eager", or what is compiled: "blocks" or "step". ranks: data-parallel ranks in all;
    ranks_here: how many of them share this machine (default: all). pool: host memory pool on.
    clip: whether gradients are clipped. optimizer: `model -> optimizer` (default: LeZero's AdamW).
    loss: `(model, batch) -> mean loss` (default: next-token cross-entropy in fp32). inputs:
    `(batch, tokens) -> batch` (default: {"tokens", "targets"} of int64 (B,T)). saves: whether
    the rank writes checkpoints, whose copy stays in host memory. steps: how many the run makes,
    where known. device: kind of device it runs on.

    attention: whose kernel computes it, "torch" or "lezero"; "auto": the faster one by measurement,
    as the engine chooses.

    zero: how the model is sharded over the ranks (None: not at all, torch's data parallelism).
    wire: how they exchange then. levels: how fast they reach each other, as `lezero.comm.probe`
    measured (`Topology.levels`); without it a speed is assumed.

    Raises `ConfigError` for a value that is not allowed.
    """

    batch: int
    tokens: int
    accumulate: int = 1
    precision: str = "fp32"
    form: str = "eager"
    ranks: int = 1
    ranks_here: int | None = None
    pool: bool = True
    clip: bool = True
    optimizer: MakeOptimizer | None = None
    loss: Loss | None = None
    inputs: Inputs | None = None
    saves: bool = False
    attention: str = "auto"
    steps: int | None = None
    device: str = "cpu"
    zero: Zero | None = None
    wire: Wire = field(default_factory=Wire)
    levels: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "accumulate", "ranks", "ranks_here", "steps"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole(name, value))
        if self.precision not in PRECISIONS:
            allowed = ", ".join(PRECISIONS)
            raise ConfigError(f"precision: got '{self.precision}', allowed is {allowed}")
        if self.form not in FORMS:
            raise ConfigError(f"form: got '{self.form}', allowed is {', '.join(FORMS)}")
        if self.attention not in ATTENTIONS:
            allowed = ", ".join(ATTENTIONS)
            raise ConfigError(f"attention: got '{self.attention}', allowed is {allowed}")
        for name in ("pool", "clip", "saves"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name}: got {value!r}, allowed is True or False")
        for name in ("optimizer", "loss", "inputs"):
            if (value := getattr(self, name)) is not None and not callable(value):
                raise ConfigError(f"{name}: got {value!r}, allowed is a function or None")
        if self.zero is not None and not isinstance(self.zero, Zero):
            raise ConfigError(f"zero: got {self.zero!r}, allowed is a Zero, as Zero(stage=2)")
        if not isinstance(self.wire, Wire):
            raise ConfigError(f"wire: got {self.wire!r}, allowed is a Wire, as Wire()")
        if not _is_kind(self.device):
            raise ConfigError(f"device: got {self.device!r}, allowed is a kind, as 'cpu' or 'cuda'")

    @property
    def neighbours(self) -> int:
        """Ranks on this machine, this one included."""
        return min(self.ranks, self.ranks_here or self.ranks)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.batch * self.tokens * self.accumulate * self.ranks

    def with_(self, **changes: Any) -> StepSpec:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def make_batch(self) -> Any:
        """A micro-batch of the right shapes; fake when called in a fake mode."""
        if self.inputs is not None:
            return self.inputs(self.batch, self.tokens)
        tokens = torch.zeros(self.batch, self.tokens, dtype=torch.int64, device=self.device)
        return {"tokens": tokens, "targets": torch.zeros_like(tokens)}

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer(model)
        from lezero.optim import AdamW

        return AdamW(model)

    def mean_loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self.loss is not None:
            return self.loss(model, batch)
        logits_NV = model(batch["tokens"]).flatten(0, -2)
        targets = batch["targets"].flatten()
        total = cross_entropy_sum(logits_NV, targets)
        return total / (targets != IGNORED).sum().clamp(min=1)


def whole(name: str, value: Any) -> int:
    """`value` as an int, whatever kind of whole number it is; `ConfigError` where it is none."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigError(f"{name}: got {value!r}, allowed is a whole number above 0")
    return number


def _is_kind(device: Any) -> bool:
    try:
        return isinstance(device, str) and torch.device(device).type == device
    except RuntimeError:
        return False
