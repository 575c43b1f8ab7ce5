"""Refuses a model whose state alone cannot fit, from its shape, in no time.

A forecast runs the model on fake tensors, which takes minutes where there are hundreds of layers.
Nobody should wait so long to hear that a model is a thousand times too large.
"""

from __future__ import annotations

from collections.abc import Callable

from lezero.core.errors import CapacityError, ConfigError
from lezero.models import TransformerConfig, count_parameters
from lezero.parallel.zero import Zero
from lezero.plan import StepSpec
from lezero.plan.forecast import free_bytes, size
from lezero.train.config import ModelConfig, RunConfig

_FOR_ACTIVATIONS = 0.75

Shape = Callable[[ModelConfig], TransformerConfig]


def state_bytes(config: RunConfig, ranks: int, zero: Zero | None) -> float:
    """Bytes a parameter of weights, gradients and optimizer state on one of `ranks` ranks, at
    least: fp32, or bf16 weights and gradients with a master, and two moments.

    `zero`: the config's, with the type that parameters compute in. docs/zero.md has the table.
    """
    train, stage = config.train, zero.stage if zero is not None and ranks > 1 else 0
    weight = 4 if train.masters == "none" else 2
    optimizer = _optimizer_bytes(config)
    if stage == 0:
        return weight + weight + optimizer
    split = (weight + weight + optimizer) / ranks
    computes = 2 if zero is not None and zero.compute == "bf16" else weight
    own = weight / ranks if computes == weight else 0  # a shard is a view of the whole copy
    return split + {1: 2 * computes - own, 2: computes - own, 3: 0}[stage]


def require_room(config: RunConfig, shape: Shape, spec: StepSpec) -> None:
    """Raises `CapacityError` with what leaves room, when weights, gradients and optimizer state of
    one rank are more than the memory that is free for it. `shape` completes a model's config."""
    limit, model = free_bytes(spec), config.model
    count, each = count_parameters(shape(model)), state_bytes(config, spec.ranks, spec.zero)
    if count * each <= limit:
        return
    each_saved = each + (_copied_bytes(config, spec.ranks, spec.zero) if spec.saves else 0)
    fit = _what_leaves_room(model, shape, int(limit * _FOR_ACTIVATIONS / each_saved))
    raise CapacityError(
        f"this run does not fit: the model has {_many(count)} parameters, whose weights, gradients "
        f"and optimizer state alone take {size(int(count * each))} a rank, and {size(limit)} is "
        f"free for one. What leaves a quarter of it for activations: {fit}; `lz plan` forecasts "
        "what they take."
    )


def _copied_bytes(config: RunConfig, ranks: int, zero: Zero | None) -> float:
    """Of weights and optimizer state, a parameter: what a checkpoint's copy takes."""
    weight = 4 if config.train.masters == "none" else 2
    stage = zero.stage if zero is not None and ranks > 1 else 0
    return (_optimizer_bytes(config) + weight) / (ranks if stage else 1)


def _optimizer_bytes(config: RunConfig) -> float:
    moments = 8 if config.train.optimizer == "adamw" else 2
    return moments + {"none": 0, "fp32": 4, "remainder": 2}[config.train.masters]


def _what_leaves_room(model: ModelConfig, shape: Shape, most: int) -> str:
    """Fewer layers of this width, and half the width as often as it takes."""
    found = []
    if model.folder is None:
        layers = model.layers
        while layers > 1 and _count(model, shape, layers=layers) > most:
            layers = layers * 7 // 8 if layers > 8 else layers - 1
        if _count(model, shape, layers=layers) <= most:
            found.append(f"model.layers={layers}")
        dim = model.dim
        while dim > 64 and _count(model, shape, dim=dim) > most:
            dim //= 2
        if _count(model, shape, dim=dim) <= most:
            found.append(f"model.dim={dim}")
    return ", or ".join([*found, f"any model of up to about {_many(most)} parameters"])


def _count(model: ModelConfig, shape: Shape, **changes: int) -> float:
    """Parameters of a changed model; infinitely many where there can be no such model."""
    if "dim" in changes and model.ffn is not None:
        changes["ffn"] = max(1, model.ffn * changes["dim"] // model.dim)
    try:
        return count_parameters(shape(model.model_copy(update=changes)))
    except (ConfigError, ValueError):
        return float("inf")


def _many(count: int) -> str:
    for unit, name in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return f"{count:,}"
