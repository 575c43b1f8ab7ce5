"""Hugging Face folders that others quantized with GPTQ or AWQ, as models of our own layers."""

from __future__ import annotations

import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lezero.compress.quantize.foreign import Foreign, Layer, read_layer
from lezero.compress.quantize.forms import several
from lezero.compress.quantize.layout import assign_from, missing_buffers
from lezero.compress.quantize.modules import QuantizedLinear
from lezero.compress.quantize.nested import leave_nested
from lezero.compress.quantize.ordered import OrderedWeight
from lezero.compress.quantize.sites import kind_of, not_finite
from lezero.compress.quantize.twins import all_or_nothing
from lezero.compress.quantize.weights import PackedWeight
from lezero.core import ledger
from lezero.core.errors import ConfigError, FileError
from lezero.core.interrupts import held_interrupts
from lezero.memory.pool import give_back_free_blocks
from lezero.models import Transformer
from lezero.models.hf_config import SUPPORTED, from_hf, quantized_how, unread
from lezero.models.huggingface import (
    no_regular_file,
    read_json,
    read_tensor,
    tensor_names,
    weight_files,
)
from lezero.ops.quantize.grid import SCALE_DTYPES

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where AutoGPTQ and AutoAWQ described a model before transformers took this into the config.json.
Their first versions do not name the method."""
_AWQ_VERSIONS = ("gemm", "gemv", "gemv_fast", "llm-awq")
_USUAL = ("model.safetensors", "model.safetensors.index.json")
_NEEDLESS = (r"rotary_emb\.inv_freq$", r"\.masked_bias$")
"""What older files hold beside weights, and no model reads any more."""
_SHOWN = 5
# Bytes from which the heap is worth trimming: what is freed there otherwise stays resident.
_LARGE = 1 << 20


def import_quantized(root: Path, model: nn.Module | None) -> nn.Module:
    """The model in a folder of GPTQ or AWQ, its codes, scales and zero points taken as they are.

    Weights decode to the type of most of the model's floats, to that of their scales where there
    are none. See `lezero.compress.quantize.opened.load_quantized`, which calls this.
    """
    data = read_json(root / "config.json")
    about = _about(data, root)
    if model is None:
        model = _build(data, root)
    with ExitStack() as stack:
        stored = _open(_weight_files(root), stack, isinstance(model, Transformer))
        layers = _layers(model, stored, about, root)
        floats = _floats(model, stored, set(layers), root)
    kept = _float_type(model, floats)
    device = next((x.device for x in model.parameters() if not x.is_meta), torch.device("cpu"))
    state = {name: value.to(device) for name, value in floats.items()}
    with held_interrupts(), all_or_nothing(model):
        for name, weight in layers.items():
            weight.decodes_to = kept or weight.dtype
            _become(model.get_submodule(name), weight, floats.get(f"{name}.bias"))
        assign_from(root, model, state, strict=False)
    if device.type != "cpu":
        model.to(device)
    if isinstance(model, Transformer):
        model.rope.ready(1, torch.device("cpu"))
    ledger.record(model, "quantize_")
    leave_nested(model)
    return model.eval()


def _build(data: dict[str, Any], root: Path) -> Transformer:
    plain = {key: value for key, value in data.items() if key != "quantization_config"}
    kind = data.get("model_type")
    if kind not in SUPPORTED:
        raise FileError(
            f"{root / 'config.json'}: model_type {str(kind)[:40]!r} is not built here, built are "
            f"{', '.join(SUPPORTED)}; build the model yourself (best inside "
            "lezero.nn.meta.parameters_on_meta()) and give it: lz.load_quantized(folder, model). "
            "lz.LLM and commands open those built here only"
        )
    try:
        config = from_hf(plain, str(root / "config.json"))
    except ConfigError as error:
        raise FileError(str(error)) from None
    with torch.device("meta"):
        return Transformer(config)


def _float_type(model: nn.Module, floats: Mapping[str, Tensor]) -> torch.dtype | None:
    """Of most of the values that stayed."""
    sizes: Counter[torch.dtype] = Counter()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in floats and parameter.is_floating_point():
            sizes[floats[name].dtype] += floats[name].numel()
    return max(sizes, key=sizes.__getitem__, default=None)


def _about(data: dict[str, Any], root: Path) -> Foreign:
    where, found = f"{root / 'config.json'}: quantization_config", quantized_how(data)
    beside = described_beside(root)
    if found is None and beside is not None:
        where, found = str(beside), read_json(beside)
        found["quant_method"] = found.get("quant_method") or _BESIDE[beside.name]
    if found is None:
        raise FileError(
            f"{root}: holds no quantized model: neither a manifest.json of LeZero, nor a "
            f"quantization_config in its config.json, nor a {' or '.join(_BESIDE)}; "
            "lezero.models.load_hf opens plain folders"
        )
    if not isinstance(found, dict):
        raise FileError(f"{where}: is no JSON object; copy the file of the model again")
    found = {key: value for key, value in found.items() if value is not None}
    method = found.get("quant_method")
    if method == "lezero":
        raise FileError(
            f"{root}: manifest.json is missing, which says what the tensors are: the folder is "
            "damaged; copy it again, or write it again with lz.save_quantized"
        )
    if why := unread(found):
        raise FileError(f"{where}: {why}")
    # What older AWQ files and newer GPTQ files say; where both are there the usual name counts.
    named = {"w_bit": "bits", "q_group_size": "group_size", "format": "checkpoint_format"}
    if method == "awq":  # newer transformers call the version the format
        there = {key: str(found.get(key)).lower() for key in ("format", "checkpoint_format")}
        named |= {key: "version" for key, value in there.items() if value in _AWQ_VERSIONS}
    renamed = {named[key]: value for key, value in found.items() if key in named}
    try:
        about = Foreign.parse({**renamed, **found}, where)
    except ConfigError as error:
        raise FileError(str(error)) from None
    about.check(where)
    return about


def described_beside(root: Path) -> Path | None:
    """The file beside config.json in which older tools said how a model is quantized."""
    return next((root / name for name in _BESIDE if (root / name).is_file()), None)


def _weight_files(root: Path) -> list[Path]:
    """`weight_files`, and a file of another name where it is the only one, as AutoGPTQ wrote."""
    others = sorted(root.glob("*.safetensors"))
    if not others or any((root / name).is_file() for name in _USUAL):
        return weight_files(root)
    if len(others) == 1 and not re.search(r"-\d+-of-\d+\.", others[0].name):
        if not others[0].is_file():
            raise no_regular_file(others[0])
        return others
    there = ", ".join(path.name for path in others[:_SHOWN])
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    raise FileError(
        f"{root}: has neither {_USUAL[0]} nor {_USUAL[1]}, and what is there is not one whole file "
        f"({there}{more}); copy the index, or leave the file of the weights alone there"
    )


_Stored = dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]]


def _open(files: list[Path], stack: ExitStack, own: bool) -> _Stored:
    """Name here → shape and what reads it."""
    held = tensor_names(files, "model." if own else "")
    opened = {x: stack.enter_context(safe_open(x, framework="pt", device="cpu")) for x in files}
    found: _Stored = {}
    for here, (path, name) in held.items():
        shape = tuple(opened[path].get_slice(name).get_shape())
        found[here] = shape, functools.partial(read_tensor, opened[path], path, name)
    return found


def _layers(
    model: nn.Module, stored: _Stored, about: Foreign, root: Path
) -> dict[str, PackedWeight]:
    """Each layer's weight, packed as it is read: codes take a byte each before."""
    found: dict[str, PackedWeight] = {}
    disputed: list[str] = []
    names = _named(model, stored)
    _check_layers(names, model, root)
    for name in names:
        module = model.get_submodule(name)
        parts = {part: stored[f"{name}.{part}"][1] for part in _PARTS if f"{name}.{part}" in stored}
        held = module.get_parameter("weight").shape
        shape = torch.Size(held[::-1]) if type(module).__name__ == "Conv1D" else held
        try:
            read = {part: load() for part, load in parts.items()}
            layer = read_layer(read, (shape[0], shape[1]), about)
            found[name] = _packed(layer)
        except ValueError as error:
            raise FileError(f"{root}: layer '{name}': {error}") from None
        if layer.disputed:
            disputed.append(name)
        if 4 * shape.numel() > _LARGE:  # codes as they are unpacked
            give_back_free_blocks()
    if not found:
        beside = described_beside(root)
        by = "config.json" if beside is None else beside.name
        raise FileError(
            f"{root}: {by} says that layers are quantized by {about.quant_method}, and none is; "
            "if float weights were saved over a quantized model's, "
            + ("copy their config.json again" if beside is None else f"move {by} away")
        )
    if disputed:
        _warn_of_zeros(disputed, about, root)
    return found


def _warn_of_zeros(layers: list[str], about: Foreign, root: Path) -> None:
    shown = ", ".join(f"'{name}'" for name in layers[:_SHOWN])
    more = f" and {len(layers) - _SHOWN} more" if len(layers) > _SHOWN else ""
    rule = (
        "as GPTQModel writes them, which meta.quantizer names; programs that take each by itself "
        "read other weights"
        if about.by_gptqmodel
        else "each by itself, as AutoGPTQ does; if GPTQModel wrote them, say so as meta.quantizer "
        "in the quantization_config"
    )
    warnings.warn(
        f"{root}: zero points of 0 in {shown}{more}, for which programs that write the checkpoint "
        f"format 'gptq' have two rules; they are read {rule}",
        stacklevel=5,  # the caller of load_quantized
    )


def _named(model: nn.Module, stored: _Stored) -> list[str]:
    """Layers that any part of a quantized one is there for."""
    own, ends = model.state_dict(), tuple(f".{part}" for part in _PARTS if part != "g_idx")
    found = (key.rpartition(".")[0] for key in stored if key.endswith(ends) and key not in own)
    return list(dict.fromkeys(found))


def _check_layers(names: Sequence[str], model: nn.Module, root: Path) -> None:
    """Raises `FileError` where one is no linear layer, or its weight is in the model another
    layer's too, which has no codes in the files: the two would be one no longer."""
    modules = dict(model.named_modules())
    for name in names:
        module = modules.get(name)
        if module is None or kind_of(module) != "linear":
            remedy = _of_tied_head(name, model, root)
            raise FileError(
                f"{root}: '{name}' is quantized, but is no linear layer of the model{remedy}"
            )
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    for name in names:
        there = users[id(model.get_parameter(f"{name}.weight"))]
        if others := [other for other in there if other not in names]:
            raise FileError(
                f"{root}: '{name}' is quantized, and in the model its weight is that of "
                f"'{others[0]}' too, which is not: set tie_word_embeddings to false in "
                f"{root / 'config.json'}, and build the model from it"
            )


def _of_tied_head(name: str, model: nn.Module, root: Path) -> str:
    """What an error adds where the head has codes of its own, and config.json says it has none."""
    if name != "lm_head" or not isinstance(model, Transformer) or not model.config.tied:
        return ""
    return (
        "; tie_word_embeddings is true, so that the head has no weight of its own: set "
        f"tie_word_embeddings to false in {root / 'config.json'}"
    )


def _floats(
    model: nn.Module, stored: _Stored, quantized: set[str], root: Path
) -> dict[str, Tensor]:
    """The tensors that stayed; names all that is missing, unexpected or misshapen."""
    state = model.state_dict(keep_vars=True)
    skipped = {f"{name}.weight" for name in quantized}
    wanted = {name: value for name, value in state.items() if name not in skipped}
    used = {f"{name}.{part}" for name in quantized for part in _PARTS}
    ignored = [*_NEEDLESS, *_ignored(model)]
    found: dict[str, Tensor] = {}
    problems: dict[str, str] = {}
    for name, (shape, read) in stored.items():
        if name in used:
            continue
        if name not in wanted:
            known = any(re.search(pattern, name) for pattern in ignored)
            if not known and not _needless(name, read, stored, quantized):
                problems[name] = f"unexpected {name}"
        elif shape != tuple(wanted[name].shape):
            problems[name] = f"{name} is {shape}, it should be {tuple(wanted[name].shape)}"
        elif problem := _misfit(name, value := read(), wanted[name]):
            problems[name] = problem
        else:
            found[name] = value
    tied = {id(wanted[name]): name for name in found}
    for name, value in wanted.items():
        if name in found or name in problems:
            continue
        if id(value) in tied:
            found[name] = found[tied[id(value)]]
        else:
            problems[name] = f"missing {name}"
    told = list(problems.values())
    if not isinstance(model, Transformer):
        told += missing_buffers(model, model)
    if told:
        raise FileError(f"{root}: the tensors do not fit the model: {several(told)}")
    return found


def _ignored(model: nn.Module) -> Iterable[str]:
    """Patterns of other such names, which a model of transformers has (the masks of GPT-2)."""
    found: Iterable[str] | None = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    return found or ()


def _misfit(name: str, value: Tensor, wanted: Tensor) -> str:
    """What keeps `value` from the place of `wanted`; nothing where it fits."""
    if value.is_floating_point() != wanted.is_floating_point():
        return f"{name} is {value.dtype}, it should be {wanted.dtype}"
    if not isinstance(wanted, nn.Parameter):
        return ""
    if value.is_floating_point() and value.dtype not in SCALE_DTYPES.values():
        return f"{name} is {value.dtype}, convert it to fp32, bf16 or fp16"
    bad = not_finite(value)
    return f"{bad} of {value.numel()} values of {name} are NaN or infinite" if bad else ""


def _needless(name: str, read: Callable[[], Tensor], stored: _Stored, quantized: set[str]) -> bool:
    """Biases of zeros, which some writers add to every layer, and the head of a tied model."""
    if name.removesuffix(".bias") in quantized:
        return not bool(read().any())
    if name == "lm_head.weight" and "embed_tokens.weight" in stored:
        return torch.equal(read(), stored["embed_tokens.weight"][1]())
    return False


def _packed(layer: Layer) -> PackedWeight:
    kept = SCALE_DTYPES[layer.grid.scale_dtype]
    if layer.order is None:
        return PackedWeight.of(layer.made, layer.grid, kept)
    return OrderedWeight.ordered(layer.made, layer.order, layer.grid, kept)


def _become(module: nn.Module, weight: PackedWeight, bias: Tensor | None) -> None:
    given = None if bias is None else nn.Parameter(bias)
    QuantizedLinear(module, weight, given, None, 16).take_over(module)
