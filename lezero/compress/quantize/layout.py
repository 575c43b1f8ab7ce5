"""What the quantized layers of a model are, in plain data, and a float model made into them.

With `describe` beside a `state_dict` a quantized model is complete: build the float model (on meta,
if it is large), `rebuild_` it, load the state. No calibration code takes part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lezero.compress.quantize.batch_norm import FOLDABLE, FoldedBatchNorm, become_folded
from lezero.compress.quantize.modules import (
    QuantizedConv,
    QuantizedEmbedding,
    QuantizedLayer,
    QuantizedLinear,
)
from lezero.compress.quantize.nested import leave_nested
from lezero.compress.quantize.ordered import OrderedWeight
from lezero.compress.quantize.sites import kind_of
from lezero.compress.quantize.tensors import arranged, same_bits, strides_of
from lezero.compress.quantize.weights import CodedWeight, PackedWeight, QuantizedWeight
from lezero.core import ledger
from lezero.core.errors import ConfigError, FileError
from lezero.nn.versions import versioned, versions_of
from lezero.ops.quantize import Grid

FORMAT = 1  # of a folder: the manifest's document, and where in it the tensors are
READABLE_FROM = "0.1.0"
DOCUMENT, PREFIX, MANIFEST = "quantization", "model/", "manifest.json"
_KINDS = {"linear": QuantizedLinear, "embedding": QuantizedEmbedding, "conv": QuantizedConv}
_WEIGHTS: dict[str, type[PackedWeight] | type[CodedWeight]] = {
    "packed": PackedWeight,
    "coded": CodedWeight,
    "ordered": OrderedWeight,
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def describe(model: nn.Module) -> dict[str, dict[str, Any]]:
    """JSON-ready: for each quantized layer its name and

    kind ("linear", "embedding", "conv"), weight ("packed", "coded" or "ordered"), grid (the fields
    of `lezero.ops.quantize.Grid`), shape, dtype (what it decodes to), bias, activation_bits (16 or
    8), activation_block (inputs of 8 bits that share a scale; 0: all of a token), static (whether
    `input_scale` is stored), channels_last (of a convolution: whether its outputs lie so whatever
    its inputs do), and shares_with, the first layer that has the same weight, or None.
    Batch norms that were folded: kind "folded", into (the name of the convolution, or None where
    that is no part of the model) and had_bias, whether that had one before.
    """
    place = {module: name for name, module in model.named_modules()}
    first: dict[int, str] = {}
    found: dict[str, dict[str, Any]] = {}
    names = {dtype: name for name, dtype in _DTYPES.items()}
    for name, module in model.named_modules():
        if isinstance(module, FoldedBatchNorm):
            conv = module.__dict__["conv"][0]
            found[name] = {
                "kind": "folded",
                "into": None if conv is None else place.get(conv),
                "had_bias": module._buffers["was_conv_bias"] is not None,
            }
        if not isinstance(module, QuantizedLayer):
            continue
        weight = module.weight
        if weight.dtype not in names:
            raise ConfigError(
                f"'{name}' decodes to {weight.dtype}, which no file holds; allowed are float32, "
                "bfloat16 and float16: call model.float() first"
            )
        owner = first.setdefault(id(weight), name)
        found[name] = {
            "kind": next(kind for kind, made in _KINDS.items() if type(module) is made),
            "weight": next(kind for kind, made in _WEIGHTS.items() if type(weight) is made),
            "grid": asdict(weight.grid),
            "shape": list(weight.full_shape),
            "dtype": names[weight.dtype],
            "bias": module.bias is not None,
            "activation_bits": getattr(module, "x_bits", 16),
            "activation_block": getattr(module, "x_block", 0),
            "static": module.input_scale is not None,
            "channels_last": isinstance(weight, CodedWeight) and weight.channels_last,
            "shares_with": owner if owner != name else None,
        }
    return found


def rebuild_(
    model: nn.Module,
    description: Mapping[str, Mapping[str, Any]],
    place: torch.device | None = None,
) -> nn.Module:
    """Gives the float `model` the quantized layers of `describe`, without values, in place.

    place: where the layers lie; by default on the device of the weights they replace.
    `load_state_dict` fills them (with `assign=True` where that is meta). Raises `FileError` for a
    layer that the model does not have or that has another shape, before anything is changed.
    """
    modules = dict(model.named_modules())
    for name, about in description.items():
        _check(name, about, modules)
    folded = [about["into"] for about in description.values() if about["kind"] == "folded"]
    if twice := sorted({name for name in folded if name is not None and folded.count(name) > 1}):
        raise FileError(f"'{twice[0]}' has taken in several batch norms")
    weights: dict[str, QuantizedWeight] = {}
    for name, about in description.items():
        module = modules[name]
        if about["kind"] == "folded":
            like = module._buffers["running_mean"] if about["had_bias"] else None
            conv = None if about["into"] is None else modules[about["into"]]
            become_folded(module, conv, like)
            continue
        replaced = module._parameters["weight"]
        assert replaced is not None
        with place or replaced.device:
            shared = about["shares_with"]  # the model itself has the name ""
            weight = None if shared is None else weights.get(shared)
            if weight is None:
                grid, dtype = Grid(**about["grid"]), _DTYPES[about["dtype"]]
                weight = _WEIGHTS[about["weight"]](grid, about["shape"], dtype)
                if isinstance(weight, CodedWeight):
                    weight.channels_last = about["channels_last"]
            weights[name] = weight
            _layer(module, about, weight).take_over(module)
    if weights:
        ledger.record(model, "quantize_")
        leave_nested(model)
    return model


def assign_(model: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """`model.load_state_dict(state, assign=True)`, but parameters that were one stay one, and keep
    their strides (`channels_last`), which a file does not have.

    Assigning makes a parameter for each name. Where `state` has two values for what was one (a
    bias corrected in one of its places), each name keeps its own.
    """
    names: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append((module, name))
    given = {
        name: arranged(state[name], strides_of(parameter))
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in state and state[name].shape == parameter.shape
    }
    model.load_state_dict(
        versioned({**state, **given}, versions_of(model)), strict=strict, assign=True
    )
    for (owner, first), *others in names.values():
        one = owner._parameters[first]
        assert one is not None
        for module, name in others:
            other = module._parameters[name]
            if other is not None and other is not one and same_bits(one, other):
                module._parameters[name] = one


def assign_from(
    root: Path, model: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True
) -> None:
    """`assign_` of what a folder holds; `FileError` where the model refuses it."""
    try:
        assign_(model, state, strict=strict)
    except (MemoryError, torch.OutOfMemoryError):  # which is not the folder's fault
        raise
    except Exception as error:  # a module's own loading raises what it wants
        text = " ".join(str(error).split())
        raise FileError(f"{root}: does not fit the model: {text}") from error


def missing_buffers(made: nn.Module, model: nn.Module) -> list[str]:
    """Buffers that a file cannot give: on meta in `model` and not in the `state_dict` of `made`,
    what the model becomes."""
    stored = made.state_dict()
    here = dict(model.named_buffers())
    return [
        f"{name} is on the meta device and never in a file; build the model inside "
        "lezero.nn.meta.parameters_on_meta() instead of torch.device('meta'), or on the CPU"
        for name, _ in made.named_buffers()
        if name not in stored and name in here and here[name].is_meta
    ]


def _layer(module: nn.Module, about: Mapping[str, Any], weight: QuantizedWeight) -> QuantizedLayer:
    bias = module._parameters.get("bias")
    if about["bias"] and bias is None:
        bias = nn.Parameter(torch.empty(about["shape"][0], dtype=_DTYPES[about["dtype"]]))
    scale = zero = None
    if about["static"]:
        scale = torch.empty(1, dtype=torch.float32)
        zero = torch.empty(1, dtype=torch.int32)
    if about["kind"] == "embedding":
        return QuantizedEmbedding(module, weight)
    if about["kind"] == "conv":
        assert isinstance(weight, CodedWeight)
        return QuantizedConv(module, weight, bias, scale, zero)
    bits, block = about["activation_bits"], about["activation_block"]
    return QuantizedLinear(module, weight, bias, scale, bits, block)


def _check(name: str, about: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
    module = modules.get(name)
    if module is None:
        raise FileError(f"the quantized layer '{name}' is none of the model's")
    if about["kind"] == "folded":
        if type(module) not in FOLDABLE:
            raise FileError(
                f"'{name}' is a {type(module).__name__}, which no convolution can take in"
            )
        into = about["into"]
        conv: Any = None if into is None else modules.get(into)
        fits = conv is not None and kind_of(conv) == "conv"
        if into is not None and not (fits and len(conv.weight) == module.num_features):
            raise FileError(
                f"'{name}' is part of '{into}', which is no convolution of the model's, or of "
                "other channels"
            )
        return
    weight = module._parameters.get("weight")
    kind = kind_of(module)
    if weight is None or kind != about["kind"]:
        raise FileError(
            f"'{name}' is a {type(module).__name__}, which cannot become a quantized "
            f"{about['kind']}"
        )
    shape = tuple(weight.shape[::-1] if type(module).__name__ == "Conv1D" else weight.shape)
    if shape != tuple(about["shape"]):
        raise FileError(f"'{name}' has a weight of {shape}, the quantized one is {about['shape']}")
