"""The base of the quantization configs: which weights they take, and on which grid."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Literal, Self

from pydantic import model_validator

from lezero.compress.quantize.observers import RULES_OF_GROUPS, observers
from lezero.compress.quantize.sites import Site
from lezero.core.config import Config
from lezero.core.errors import ConfigError
from lezero.ops.quantize import Grid

Activations = Literal["float", "token", "tensor"]


@dataclass(frozen=True)
class Target:
    """What one weight becomes: codes on `grid`, and activations that stay ("float") or are rounded
    to int8 (float8 for fp8 weights), each token by itself ("token") or with one scale from the
    calibration ("tensor")."""

    grid: Grid
    activations: Activations = "float"
    has_kernel: bool = True
    """Whether its codes are packed for a kernel; else they lie in the weight's shape."""

    @property
    def label(self) -> str:
        """As decisions and reports name it: "int8", "int4 g64", "int8 × int8", "fp8 × fp8"."""
        group = f" g{self.grid.group}" if isinstance(self.grid.group, int) else ""
        kind = "fp8" if self.grid.format == "fp8" else "int8"
        rounded = {"float": "", "token": f" × {kind}", "tensor": f" × static {kind}"}
        return self.grid.format + group + rounded[self.activations]


@dataclass(frozen=True)
class Recipe:
    """How codes are found; the fields that a scheme has, and else what does nothing."""

    method: str = "nearest"
    scales: str = "minmax"
    observer: str = "minmax"
    smooth: float | Literal["auto"] | None = None
    exact_above: float | None = None
    bias_correction: bool = False
    fold_batch_norm: bool = False


class Scheme(Config):
    """What quantized weights are, and how their codes are found."""

    @abstractmethod
    def target(self, site: Site) -> Target | None:
        """What `site` becomes; None: it stays. Raises `ConfigError` where a group does not fit."""

    @model_validator(mode="after")
    def _ranges_of_groups(self) -> Self:
        group, scales = getattr(self, "group", None), getattr(self, "scales", "minmax")
        if isinstance(group, int) and scales not in RULES_OF_GROUPS:
            raise ValueError(
                f"scales: got {scales!r}, allowed with a group ({group}) are "
                f"{' and '.join(map(repr, RULES_OF_GROUPS))}: it has too few values for a histogram"
            )
        return self

    def recipe(self) -> Recipe:
        given = {f.name: getattr(self, f.name) for f in fields(Recipe) if hasattr(self, f.name)}
        return Recipe(**given)


def group_for(
    site: Site, group: int | Literal["row", "tensor"], step: int = 32
) -> int | Literal["row", "tensor"]:
    """`group`, when it divides the inputs of `site`; `ConfigError` says which of the allowed ones,
    multiples of `step`, do."""
    K = site.weight().shape[1]
    if not isinstance(group, int) or K % group == 0:
        return group
    divides = [size for size in range(max(2, step), K + 1, step) if K % size == 0]
    nearest = sorted(sorted(divides, key=lambda size: abs(size - group))[:8])
    found = f"{', '.join(map(str, nearest))} do" if nearest else f"no multiple of {step} does"
    remedy = "one that divides" if nearest or step == 1 else "'row'"
    raise ConfigError(
        f"group: got {group}, which does not divide the {K} inputs of '{site.name}'; {found}. "
        f"Give {remedy}, or leave the layer out with filter="
    )


def check_group(group: int | str, *, tensor: bool = False) -> int | str:
    """`group`; `ValueError` for one that no kernel takes. tensor: whether 'tensor' is allowed."""
    if isinstance(group, int) and (group < 32 or group % 32):
        words = ", 'row' or 'tensor'" if tensor else " or 'row'"
        raise ValueError(f"allowed are multiples of 32 (32, 64, 128, …){words}")
    return group


def check_rule(rule: str) -> str:
    """An observer's name, built in or of a plug-in."""
    try:
        observers.get(rule)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return rule
