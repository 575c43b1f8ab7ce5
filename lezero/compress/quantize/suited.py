"""Whether a method has layers to work on, and what to say where it has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lezero.compress.quantize.int4 import Int4Weight
from lezero.compress.quantize.methods import Method, methods
from lezero.compress.quantize.report import in_no_layer, named
from lezero.compress.quantize.scheme import Scheme, Target
from lezero.compress.quantize.sites import Site
from lezero.core.errors import ConfigError

Targets = Mapping[str, tuple[Site, Target]]


def check_suited(
    model: nn.Module, config: Scheme, targets: Targets, left: Mapping[str, int]
) -> None:
    """`ConfigError` where the method can work on none of `targets`; `left`: see `left_over`."""
    name = config.recipe().method
    method = methods.get(name)()
    if any(method.suits(target.grid) for _, target in targets.values()):
        return
    kind, reason = type(config).__name__, _no_linear(model, targets, left)
    remedy = _fields(config, method, targets)
    if remedy and reason:
        end = f"With {remedy} it can work on what was found"
    elif remedy:
        end = f"Give {remedy}, or take another method"
    else:
        end = "Take another method"
        grids = [target.grid for _, target in targets.values()]
        wants_zeros = any(method.suits(replace(grid, zero_point=True)) for grid in grids)
        if wants_zeros and not reason and not hasattr(config, "zero_point"):
            end += f"; '{name}' needs zero points: lz.Int8Weight(zero_point=True), lz.Int4Weight()"
    raise ConfigError(
        f"method: '{name}' cannot work on what {kind} makes of these layers"
        + (f": {reason}" if reason else "")
        + f". {end}"
    )


def notes_of_method(
    model: nn.Module, config: Scheme, targets: Targets, left: Mapping[str, int]
) -> list[str]:
    """For the report, where a method that was asked for finds no linear layer in the model."""
    name = config.recipe().method
    reason = "" if name == "nearest" else _no_linear(model, targets, left)
    return [f"method '{name}': {reason}"] if reason else []


def notes_of_adapters(model: nn.Module, targets: Targets) -> list[str]:
    """For the report, where adapters of `peft` are part of weights that are to be quantized."""
    chosen = {id(user.module) for site, _ in targets.values() for user in site.users}
    merged = [
        name
        for name, module in model.named_modules()
        if getattr(module, "merged_adapters", None) and id(module.base_layer) in chosen
    ]
    if not merged:
        return []
    return [
        f"adapters are merged into the weights of {named(merged)}, and stay so: unmerge_adapter() "
        "cannot take them out of codes. Call it before lz.quantize_ where that is wanted"
    ]


def _no_linear(model: nn.Module, targets: Targets, left: Mapping[str, int]) -> str:
    """What to say where no linear layer is there but the vocabulary's; else nothing."""
    sites = list({id(site): site for site, _ in targets.values()}.values())
    linear = [site for site in sites if site.kind == "linear"]
    if not all(site.is_vocabulary for site in linear):
        return ""
    said = "no linear layer was found" + (" but the vocabulary's" if linear else "")
    rest = in_no_layer(left, sum(site.numel for site in sites))
    said += f"; {rest}" if rest else ""
    # Classes of torch's own that derive from Linear (in nn.MultiheadAttention) are not called.
    kinds = {type(x) for x in model.modules() if isinstance(x, nn.Linear)} - {nn.Linear}
    names = sorted({x.__name__ for x in kinds if not x.__module__.startswith("torch.")})
    if names:
        said += (
            f". Subclasses of Linear ({named(names)}) stay as they are, since they may "
            "compute something else; where one does not, set module.__class__ = torch.nn.Linear "
            "beforehand"
        )
    return said


def _fields(config: Scheme, method: Method, targets: Targets) -> str:
    """With which other fields of `config` the method could work on some of these; or nothing."""
    zeros = {"zero_point": True} if getattr(config, "zero_point", True) is False else {}
    int4 = {"vocabulary": "int4"} if isinstance(config, Int4Weight) else {}
    for fields in (zeros, int4, zeros | int4):
        changed = config.model_copy(update=fields)
        if any(_takes(changed, method, site) for site, _ in targets.values()):
            return " and ".join(f"{name}={value!r}" for name, value in fields.items())
    return ""


def _takes(config: Any, method: Method, site: Site) -> bool:
    """Whether the method would find codes for `site`: those of others are rounded to nearest."""
    try:
        target = config.target(site)
    except ConfigError:  # a group that does not divide
        return False
    return target is not None and site.kind == "linear" and method.suits(target.grid)
