"""What an engine may be built from: every argument is checked before anything is done with it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from lezero import checkpoint
from lezero.core import groups
from lezero.core.config import Config
from lezero.core.errors import ConfigError, OrderError
from lezero.core.log import logger
from lezero.files.tensorfile import CODES
from lezero.nn.unsized import check_sized
from lezero.optim import Schedule
from lezero.parallel.zero import sharding_of
from lezero.parallel.zero.agreement import agree
from lezero.parallel.zero.guard import check_optimizer

log = logger("train")


def check_numbers(
    *,
    accumulate: Any,
    max_skipped: Any,
    total_steps: Any,
    seed: Any,
    clip: Any,
    schedule: Schedule | None,
) -> None:
    """Raises `ConfigError` for the first that is no number or out of its range."""
    for name, value in (("accumulate", accumulate), ("max_skipped", max_skipped)):
        if not _whole(value) or value < 1:
            raise ConfigError(f"{name}: got {value!r}, allowed is a whole number from 1")
    if total_steps is not None and (not _whole(total_steps) or total_steps < 1):
        raise ConfigError(
            f"total_steps: got {total_steps!r}, allowed is a whole number from 1, or None"
        )
    if not _whole(seed):
        raise ConfigError(f"seed: got {seed!r}, allowed is a whole number")
    if clip is not None and (
        isinstance(clip, bool) or not isinstance(clip, Real) or not float(clip) > 0
    ):
        raise ConfigError(
            f"clip: got {clip!r}, allowed is a number above 0, or None for no clipping"
        )
    if schedule is not None and not isinstance(schedule, Schedule):
        raise ConfigError(f"schedule: got {schedule!r}, allowed is lz.Schedule(…), or None")
    if schedule is not None and schedule.kind != "constant" and not total_steps:
        raise ConfigError(f"schedule '{schedule.kind}' needs total_steps to know where it ends")


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises `ConfigError` or `OrderError` when `optimizer` cannot train `model`."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: got a {type(model).__name__}, allowed is a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: got a {type(optimizer).__name__}, allowed is a torch.optim.Optimizer such "
            "as lz.optim.AdamW(model.parameters(), lr=3e-4)"
        )
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            kind = type(module).__name__
            raise ConfigError(
                f"model: got one wrapped by {kind}, but the Engine itself sums gradients over the "
                "ranks, and twice is wrong; give it the module inside (wrapped.module)"
            )
    check_sized(model)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} asks for the loss several times a step (a "
            "closure), which the Engine does not do; use one that steps by the gradients it finds, "
            "such as lz.optim.AdamW"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("the model has nothing to train: no parameter requires a gradient")
    check_optimizer(optimizer)
    check_held(model, optimizer.param_groups)
    if any(p.is_meta for p in model.parameters()):
        raise OrderError("the model has parameters on meta: load or initialise them first")
    _warn_of_unsavable(model)
    checkpoint.warn_of_left_out(optimizer, dict(model.named_parameters()))


def check_held(model: nn.Module, param_groups: Sequence[dict[str, Any]]) -> None:
    """Raises `OrderError` when these groups of an optimizer hold parameters that `model` does not
    have, whose gradients nobody would empty."""
    own = {id(p) for p in model.parameters()}
    held = [p for group in param_groups for p in group["params"]]
    strangers = [p for p in held if id(p) not in own]
    if strangers:
        raise OrderError(
            f"the optimizer was given {len(strangers)} of {len(held)} parameters that the model "
            f"does not have, the first of shape {tuple(strangers[0].shape)}: build the optimizer "
            "after the model has its final parameters (a new optimizer and Engine where a layer "
            "was replaced), and make what joins it later (add_param_group) a part of the model "
            "first"
        )


def _warn_of_unsavable(model: nn.Module) -> None:
    """Says now what `Engine.save` would refuse after hours of training."""
    kinds = {
        (f"{prefix}.{name}" if prefix else name): value
        for prefix, module in model.named_modules()
        for name, value in (*module._parameters.items(), *module._buffers.items())
        if value is not None and name not in module._non_persistent_buffers_set
    }
    for name, value in kinds.items():
        if (value.layout is not torch.strided or value.dtype not in CODES) and groups.is_main():
            log.warning(
                "'%s' of the model is a %s tensor of %s, which a checkpoint cannot hold: "
                "Engine.save will refuse the model; keep it in another type, or as a buffer with "
                "persistent=False", name, value.layout, value.dtype,
            )  # fmt: skip
            return


def agree_on_arguments(
    model: nn.Module, optimizer: torch.optim.Optimizer, **arguments: Any
) -> None:
    """Raises `UnlikeError` on every rank, naming the first that ranks have unlike: these, the
    options of the optimizer's groups, and the parameters of a model that is not sharded.
    `OrderError` on one that has not joined the others."""
    groups.need_joined()
    if groups.world_size() == 1:
        return
    options = {
        f"option {key} of group {number} of the optimizer": value
        for number, group in enumerate(optimizer.param_groups)
        for key, value in sorted(group.items())
        if key not in ("params", "engine_options")
    }
    whole = sharding_of(model) is None
    parameters = {
        f"parameter {name} of the model": [
            list(p.shape),
            str(p.dtype),
            "trained" if p.requires_grad else "frozen",
        ]
        for name, p in (model.named_parameters() if whole else ())
    }
    mine = {**arguments, "optimizer": type(optimizer).__name__, **options, **parameters}
    agree("lz.Engine", {key: _plain(value) for key, value in mine.items()})


def _plain(value: Any) -> Any:
    """A value as JSON has it, as far as it goes; of anything else, what kind it is."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Config):
        return value.to_dict()
    return value if value is None or isinstance(value, str | int | float) else type(value).__name__


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
