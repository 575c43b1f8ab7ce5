"""Refuses a model whose state alone cannot fit, from its shape, in no time.

A forecast runs the model on fake tensors, which takes minutes where there are hundreds of layers.
Nobody should wait so long to hear that a model is a thousand times too large.
"""

from __future__ import annotations

from collections.abc import Callable

from lezero.core.errors import CapacityError, ConfigError
from lezero.models import TransformerConfig, count_parameters
from lezero.plan import StepSpec
from lezero.plan.forecast import free_bytes, size
from lezero.train.config import ModelConfig

STATE_BYTES = 16
"""Of one parameter: fp32 weight and gradient, and AdamW's two moments."""
_FOR_ACTIVATIONS = 0.75

Shape = Callable[[ModelConfig], TransformerConfig]


def require_room(model: ModelConfig, shape: Shape, spec: StepSpec) -> None:
    """Raises `CapacityError` with what would fit, when weights, gradients and optimizer state of
    one rank are more than the memory that is free for it. `shape` completes a model's config."""
    limit = free_bytes(spec)
    count = count_parameters(shape(model))
    if count * STATE_BYTES <= limit:
        return
    fit = _what_would_fit(model, shape, int(limit * _FOR_ACTIVATIONS / STATE_BYTES))
    raise CapacityError(
        f"this run does not fit: the model has {_many(count)} parameters, whose weights, gradients "
        f"and optimizer state alone take {size(count * STATE_BYTES)} a rank, and {size(limit)} is "
        f"free for one. What would fit: {fit}."
    )


def _what_would_fit(model: ModelConfig, shape: Shape, most: int) -> str:
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
