"""Quantized models in the compressed-tensors layout, which other servers and transformers read.

Source: the layout of the package compressed-tensors 0.20, formats `pack-quantized` (int4, and int8
without rounded activations) and `int-quantized` (int8 with rounded activations). Of a layer:

    weight_packed (N, K bits / 32) int32, lowest bits first, codes counted from 0, weight_shape; or
    weight (N, K) int8; weight_scale (N, G); weight_zero_point with zero points: packed along N, or
    int8; input_scale (1,) with static activations.

What some programs do not read of it is told; see `elsewhere`.

Embeddings and the output head are written as floats, since few servers read quantized ones. Scales
get the type of the model's other tensors.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lezero.compress.quantize.elsewhere import unreadable
from lezero.compress.quantize.floats import Fp8, Nf4
from lezero.compress.quantize.foreign import pack_int32
from lezero.compress.quantize.modules import QuantizedLinear, quantized_layers
from lezero.compress.quantize.ordered import OrderedWeight
from lezero.compress.quantize.scheme import Scheme
from lezero.compress.quantize.weights import PackedWeight
from lezero.core.errors import ConfigError
from lezero.core.log import logger
from lezero.models import Transformer
from lezero.models.hf_writing import name_there, write_hf
from lezero.models.huggingface import SINGLE
from lezero.ops.quantize import Grid

_LOG = logger("compress")
_HEAD = "lm_head"
WRITER = {"written_by": "lz.save_quantized"}  # in config.json
_SHOWN = 5
_BIASES = (
    "gives biases to layers that have none in this architecture, which readers of the folder would "
    "drop; quantize with bias_correction=False, or save with layout='lezero'"
)


def export_compressed_tensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    tokenizer_folder: str | os.PathLike[str] | None = None,
    gone: Collection[str] = (),
) -> Path:
    """Writes a quantized `Transformer` as a Hugging Face folder that other servers open, and warns
    of what some of them do not. gone: files there that are not to stay beside it.

    Raises `ConfigError` for what the layout cannot say: fp8 and nf4 of ours, zero points that are
    no whole numbers (those of "hqq"), inputs in GPTQ's act-order, groups that do not divide a
    layer's inputs, biases that the architecture does not have (those of `bias_correction`), modules
    of other libraries.
    """
    if not isinstance(model, Transformer):
        raise ConfigError(
            f"layout 'compressed-tensors': got a {type(model).__name__}, allowed is a model of "
            "lezero.models; save it with layout='lezero'"
        )
    _check_biases(model)
    layers = _held_layers(model)
    for name, layer in layers.items():
        _check(name, layer)
    grids = _grids({name: layer.weight for name, layer in layers.items()})
    dtype = model.norm.weight.dtype
    tensors: dict[str, Tensor] = {}
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for name, layer in layers.items():
        static = layer.input_scale is not None
        # Readers know no scales of blocks of a token: they get inputs that are not rounded.
        scheme = _scheme(grids[name], 16 if layer.x_block else layer.x_bits, static)
        for known, members in groups:
            if known == scheme:
                members.append(name_there(name))
                break
        else:
            groups.append((scheme, [name_there(name)]))
        parts = _parts(name, layer.weight, scheme, dtype)
        if layer.input_scale is not None:
            parts["input_scale"] = _stored(name, layer.input_scale.reshape(1), dtype)
        if layer.bias is not None:
            parts["bias"] = layer.bias.detach()
        tensors |= {f"{name_there(name)}.{part}": value for part, value in parts.items()}
    tensors |= _floats(model, set(layers), dtype)
    tensors = {name: value.cpu().contiguous() for name, value in tensors.items()}
    schemes: dict[str, Any] = dict.fromkeys(_left(model, set(layers)))
    schemes |= {name: scheme for scheme, members in groups for name in members}
    inputs = {name_there(name): layer.weight.full_shape[1] for name, layer in layers.items()}
    for why in unreadable(schemes, inputs):
        _LOG.warning("%s: %s", folder, why)
    return write_hf(
        model.actual_config,
        folder,
        lambda aside: save_file(tensors, aside / SINGLE, metadata={"format": "pt"}),
        str(dtype).removeprefix("torch."),
        tokenizer_folder,
        {"quantization_config": _config(groups, _left(model, set(layers))), **WRITER},
        gone,
    )


def why_not_exported(scheme: Scheme) -> str:
    """What of a model quantized by `scheme` the layout cannot hold; nothing where it can."""
    if isinstance(scheme, Fp8 | Nf4):
        return f"{type(scheme).__name__} cannot be written in it; int4 and int8 can"
    if getattr(scheme, "method", None) == "hqq":
        return "the zero points of 'hqq' are no whole numbers; take another method"
    if getattr(scheme, "bias_correction", False):
        return f"bias_correction=True {_BIASES}"
    return ""


def _held_layers(model: Transformer) -> dict[str, Any]:
    """The quantized layers that the layout holds; `ConfigError` where there are none."""
    layers = {n: x for n, x in quantized_layers(model).items() if n not in ("embed_tokens", _HEAD)}
    if not layers:
        raise ConfigError(
            "layout 'compressed-tensors': no layer that it holds is quantized (embeddings and the "
            "output head are floats in it); quantize others too, or save with layout='lezero'"
        )
    return layers


def _check_biases(model: Transformer) -> None:
    """`ConfigError` where layers have biases that config.json does not announce: whoever reads the
    folder would leave them out without a word."""
    with torch.device("meta"):
        announced = {name for name, _ in Transformer(model.actual_config).named_parameters()}
    found = model.named_parameters(remove_duplicate=False)
    names = {name for name, _ in found if name.endswith(".bias")}
    extra = sorted(name.removesuffix(".bias") for name in names - announced)
    if extra:
        shown = ", ".join(f"'{name}'" for name in extra[:_SHOWN])
        more = f" and {len(extra) - _SHOWN} more" if len(extra) > _SHOWN else ""
        raise ConfigError(
            f"layout 'compressed-tensors': {shown}{more} got biases; bias_correction=True {_BIASES}"
        )


def _check(name: str, layer: Any) -> None:
    """`ConfigError` where the layout cannot say what a layer is."""
    weight, rest = layer.weight, "; save with layout='lezero', which keeps it"
    if isinstance(weight, OrderedWeight):
        raise ConfigError(
            f"layout 'compressed-tensors': '{name}' has its inputs in act-order, which it cannot "
            f"say{rest}"
        )
    if not isinstance(layer, QuantizedLinear) or not isinstance(weight, PackedWeight):
        raise ConfigError(
            f"layout 'compressed-tensors': '{name}' ({weight.extra_repr()}) cannot be written in "
            f"it; int4 and int8 in rows or groups can{rest}"
        )
    K, group = weight.full_shape[1], weight.group
    if group and K % group:
        raise ConfigError(
            f"layout 'compressed-tensors': '{name}' has {K} inputs in groups of {group}, the last "
            "of them cut short, which transformers does not open; save with layout='lezero'"
        )


def _grids(weights: Mapping[str, PackedWeight]) -> dict[str, Grid]:
    """What each layer is written as. transformers decodes all layers by one description, so layers
    of the same bits are given the same where they can be: zero points, those in the middle too,
    where one of them has others; and groups where a row is one of the others' groups."""
    off_middle: set[int] = set()
    groups = {(weight.grid.bits, weight.group) for weight in weights.values()}
    for weight in weights.values():
        zero = weight.unpacked().zero if weight.grid.zero_point else None
        if zero is not None and bool((zero.float() != _middle(weight)).any()):
            off_middle.add(weight.grid.bits)
    made = {}
    for name, weight in weights.items():
        bits, K = weight.grid.bits, weight.full_shape[1]
        group = K if (bits, K) in groups else weight.grid.group
        made[name] = replace(weight.grid, zero_point=bits in off_middle, group=group)
    return made


def _middle(weight: PackedWeight) -> int:
    return 1 << (weight.grid.bits - 1)


def _scheme(grid: Grid, x_bits: int, static: bool) -> dict[str, Any]:
    """One entry of `config_groups`, without its targets."""
    grouped = isinstance(grid.group, int)
    weights = {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": not grid.zero_point,
        "strategy": "group" if grouped else "channel",
        "group_size": grid.group if grouped else None,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    inputs = None
    if x_bits == 8:
        inputs = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "tensor" if static else "token",
            "group_size": None,
            "dynamic": not static,
            "actorder": None,
            "block_structure": None,
            "observer": "minmax" if static else None,
            "observer_kwargs": {},
        }
    form = "int-quantized" if x_bits == 8 and grid.bits == 8 else "pack-quantized"
    return {
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": form,
    }


def _left(model: nn.Module, quantized: set[str]) -> list[str]:
    """Linear layers that are written as floats."""
    return [
        name_there(name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | QuantizedLinear) and name not in quantized
    ]


def _config(groups: list[tuple[dict[str, Any], list[str]]], left: list[str]) -> dict[str, Any]:
    if _HEAD not in left:
        left.append(_HEAD)  # transformers builds one for tied models too
    formats = {scheme["format"] for scheme, _ in groups}
    made: Mapping[str, Any] = {
        f"group_{index}": {**scheme, "targets": ["Linear"] if len(groups) == 1 else members}
        for index, (scheme, members) in enumerate(groups)
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": made,
        "ignore": left,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _parts(
    name: str, weight: PackedWeight, scheme: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    codes, scale, zero = weight.unpacked()
    bits, middle = weight.grid.bits, _middle(weight)
    counted = codes.to(torch.int16) + (middle if codes.dtype == torch.int8 else 0)
    parts = {"weight_scale": _stored(name, scale, dtype)}
    whole = None
    if not scheme["weights"]["symmetric"]:
        found = torch.full_like(scale, middle) if zero is None else zero
        whole = found.float().round()
        if not torch.equal(whole, found.float()):
            raise ConfigError(
                f"layout 'compressed-tensors': the zero points of '{name}' are no whole numbers; "
                "quantize with zero_point=False, or another method than 'hqq'"
            )
    if scheme["format"] == "int-quantized":
        parts["weight"] = (counted - middle).to(torch.int8)
        if whole is not None:
            parts["weight_zero_point"] = (whole - middle).to(torch.int8)
        return parts
    parts["weight_packed"] = pack_int32(counted, bits, 1)
    parts["weight_shape"] = torch.tensor(weight.full_shape, dtype=torch.int64)
    if whole is not None:
        parts["weight_zero_point"] = pack_int32(whole.to(torch.int16), bits, 0)
    return parts


def _stored(name: str, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in the model's type; `ConfigError` where it has not even bf16's digits for them."""
    stored = scale.to(dtype)
    if bool(((stored.float() - scale.float()).abs() > scale.float().abs() * 2.0**-8).any()):
        raise ConfigError(
            f"layout 'compressed-tensors': scales of '{name}' down to {float(scale.min()):.1g} "
            f"lose their digits in {dtype}, the model's type; write model.bfloat16()"
        )
    return stored


def _floats(model: Transformer, quantized: set[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Norms, the embedding and the head; the head of a tied model is not written."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        layer = name.rpartition(".")[0]
        if layer not in quantized:
            found[name_there(name)] = parameter.detach().to(dtype)
    for name, module in quantized_layers(model).items():
        if name not in quantized:
            found[name_there(f"{name}.weight")] = module.weight.decode(dtype)
    return found
