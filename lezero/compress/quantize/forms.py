"""The description of quantized layers as it stands in a file, checked before it is believed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from lezero.compress.quantize.sites import not_finite
from lezero.compress.quantize.tensors import is_dense
from lezero.core.config import Config
from lezero.core.errors import ConfigError, FileError
from lezero.ops.quantize import Grid

_MOST_LAYERS = 1 << 18
_SHOWN = 5


class GridForm(Config):
    """The fields of `lezero.ops.quantize.Grid`."""

    format: Literal["int8", "int4", "fp8", "nf4"]
    group: int | Literal["row", "tensor"]
    zero_point: bool
    scale_dtype: Literal["fp32", "fp16", "bf16"]


class LayerForm(Config):
    """One quantized layer, as `lezero.compress.quantize.layout.describe` gives it."""

    kind: Literal["linear", "embedding", "conv"]
    weight: Literal["packed", "coded", "ordered"]
    grid: GridForm
    shape: tuple[int, ...] = Field(min_length=2, max_length=4)
    dtype: Literal["fp32", "bf16", "fp16"]
    bias: bool
    activation_bits: Literal[8, 16]
    activation_block: Literal[0, 32]
    static: bool
    channels_last: bool = False
    shares_with: str | None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        Grid(**self.grid.to_dict())
        if any(size < 1 for size in self.shape):
            raise ValueError("shape: sizes are at least 1")
        if (self.kind == "conv") != (len(self.shape) > 2):
            raise ValueError(f"a {self.kind} has no weight of {len(self.shape)} dims")
        if self.channels_last and len(self.shape) < 4:
            raise ValueError(f"channels_last: a weight of {len(self.shape)} dims has no channels")
        group, inputs = self.grid.group, math.prod(self.shape[1:])
        if isinstance(group, int) and not 1 <= group <= inputs:
            raise ValueError(f"grid.group: got {group}, allowed are 1 to {inputs}, the inputs")
        blocks = self.kind == "linear" and self.activation_bits == 8 and self.weight != "coded"
        if self.activation_block and (self.static or not blocks):
            raise ValueError("activations in blocks go with 8 bits, packed weights and no scale")
        if self.weight == "coded":
            rounds = self.kind == "linear" and self.activation_bits == 8
            fp8 = self.grid.format == "fp8" and self.grid.group == "row" and not self.static
            if rounds and not fp8:
                raise ValueError("activations of 8 bits go with packed weights and fp8 in rows")
            return self
        kernel = self.grid.format in ("int8", "int4") and self.kind != "conv"
        if not kernel or group == "tensor" or (isinstance(group, int) and group % 32):
            raise ValueError("packed weights are int8 or int4 in rows or in groups of 32 times n")
        return self


def check_layers(data: object, where: str) -> dict[str, dict[str, Any]]:
    """The layers of a stored description; `FileError` for the first that cannot be."""
    if not isinstance(data, Mapping) or len(data) > _MOST_LAYERS:
        raise FileError(f"{where}: no table of layers")
    found: dict[str, dict[str, Any]] = {}
    for name, about in data.items():
        here = f"{where}: '{str(name)[:200]}'"
        if isinstance(about, Mapping) and about.get("kind") == "folded":
            whole = about.keys() == {"kind", "into", "had_bias"}
            if not whole or not isinstance(about["into"], str | None):
                raise FileError(f"{here} does not name the convolution that it is part of")
            if not isinstance(about["had_bias"], bool):
                raise FileError(
                    f"{here}: had_bias is {about['had_bias']!r:.40}, allowed is a boolean"
                )
            found[name] = dict(about)
            continue
        try:
            layer = LayerForm.parse(about, here)
        except ConfigError as error:
            raise FileError(str(error)[:2000]) from None
        other = None if layer.shares_with is None else found.get(layer.shares_with)
        made = {**layer.to_dict(), "shape": list(layer.shape)}
        same = ("weight", "grid", "shape", "dtype")
        if layer.shares_with is not None and (
            other is None or any(other.get(key) != made[key] for key in same)
        ):
            raise FileError(f"{here} shares its weight with a layer that is none, or another")
        found[name] = made
    return found


def unsound(
    tensors: Mapping[str, Tensor], layers: Iterable[str], parameters: Iterable[str]
) -> list[str]:
    """What of a model no result can come from: parameters that are NaN, what is beside the codes of
    quantized layers that is NaN or infinite, and scales of activations that are not above 0."""
    parts = ("weight.scale", "weight.zero", "input_scale")
    beside = {f"{name}.{part}".removeprefix(".") for name in layers for part in parts}
    found = []
    for name in sorted({*parameters, *beside} & tensors.keys()):
        value = tensors[name]
        bad = not_finite(value) if value.is_floating_point() and is_dense(value) else 0
        if bad and name not in beside:
            bad = int(value.isnan().sum())  # infinities may be a mask
        if bad:
            what = "NaN or infinite" if name in beside else "NaN"
            found.append(f"{bad} of {value.numel()} values of {name} are {what}")
        elif name in beside and name.endswith("input_scale") and not bool((value > 0).all()):
            found.append(f"{name} is {value.min().item():g}, it should be above 0")
    return found


def several(problems: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more
