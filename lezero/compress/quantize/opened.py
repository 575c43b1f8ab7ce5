"""Quantized models from folders: read verified, without calibration code.

`lezero.compress.quantize.saved` writes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from lezero.compress.quantize.forms import check_layers, several, unsound
from lezero.compress.quantize.imported import described_beside, import_quantized
from lezero.compress.quantize.layout import (
    DOCUMENT,
    FORMAT,
    MANIFEST,
    PREFIX,
    assign_from,
    missing_buffers,
    rebuild_,
)
from lezero.compress.quantize.modules import (
    SCALES,
    QuantizedLayer,
    check_module,
    check_names,
    quantized_layers,
)
from lezero.compress.quantize.twins import all_or_nothing, twin
from lezero.compress.quantize.weights import QuantizedWeight
from lezero.core.errors import FileError, OrderError
from lezero.core.interrupts import held_interrupts
from lezero.core.paths import expand_home
from lezero.data.special import read_object
from lezero.files import Form, Generation, read_generation
from lezero.models import Transformer, TransformerConfig
from lezero.models.hf_config import quantized_how

Model = TypeVar("Model", bound=nn.Module)


@overload
def load_quantized(folder: str | os.PathLike[str], model: None = None) -> Transformer: ...


@overload
def load_quantized(folder: str | os.PathLike[str], model: Model) -> Model: ...


def load_quantized(folder: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """The quantized model in a folder, ready to run; its layers never take their float size.

    Reads what `lz.save_quantized` wrote, and Hugging Face folders of GPTQ and AWQ; it warns where
    GPTQ's two rules for zero points differ (`lezero.compress.quantize.foreign`). Models of the
    Llama family are built here; for others give the float `model`, which becomes the quantized one
    in place: best built inside `lezero.nn.meta.parameters_on_meta()`, without memory. Parameters
    that are one in it stay one. Errors: `FileError` for a folder that is neither, that does
    not fit the model, or is of another format; `CorruptError` for bytes that are not what was
    written. `model` is then as it was.
    """
    root = Path(expand_home(folder))
    if model is not None:
        check_module(model, "lz.load_quantized")
        check_names(model, "lz.load_quantized")
        if quantized_layers(model):
            raise OrderError(
                "lz.load_quantized: give the float model, this one is quantized already"
            )
    if not _has_manifest(root):
        return import_quantized(root, model)
    _check_described(root)
    found = _Found(root, model)
    tensors = read_generation(
        root, select=lambda name: name.startswith(PREFIX), look=found.look
    ).tensors
    model, layers, biased = found.model, found.layers, found.biased
    assert model is not None
    _check_values(layers, tensors, model, root)
    device = _device(model)
    state = {name.removeprefix(PREFIX): x for name, x in tensors.items()}
    with held_interrupts(), all_or_nothing(model):
        _give_biases(model, biased)
        rebuild_(model, layers, torch.device("meta"))  # the floats are kept beside the state
        assign_from(root, model, state)
        model._apply(lambda x: x if x.is_meta else x.to(device))  # no second copy of all codes
    if isinstance(model, Transformer):
        model.rope.ready(1, torch.device("cpu"))
    return model.eval()


class _Found:
    """What a folder's manifest says, checked against `given` before its tensors are read."""

    layers: dict[str, dict[str, Any]]
    biased: list[_Bias]

    def __init__(self, root: Path, given: nn.Module | None) -> None:
        self.root, self.given, self.model = root, given, given

    def look(self, known: Generation) -> None:
        self.layers = _layers(known, self.root)
        self.model = _build(known, self.root) if self.given is None else self.given
        self.biased = _expect(self.model, self.layers, known, self.root)


def _has_manifest(root: Path) -> bool:
    try:
        return (root / MANIFEST).is_file()
    except OSError as error:
        raise FileError(f"{root}: cannot be read ({error.strerror})") from error


def is_quantized_folder(folder: str | os.PathLike[str]) -> bool:
    """Whether `load_quantized` is what opens a folder."""
    root = Path(expand_home(folder))
    config = root / "config.json"
    if not config.is_file():
        return False
    if _has_manifest(root):
        return True
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # whoever opens the folder says what is wrong with it
    if not isinstance(data, dict):
        return False
    return quantized_how(data) is not None or described_beside(root) is not None


def _check_described(root: Path) -> None:
    """Raises `FileError` where other weights were saved over a quantized model's folder: their
    writer left the manifest, and the model before would be opened."""
    config = root / "config.json"
    about = read_object(config).get("quantization_config") if config.is_file() else None
    method = about.get("quant_method") if isinstance(about, Mapping) else None
    if config.is_file() and method != "lezero":
        raise FileError(
            f"{root}: two models lie here: {MANIFEST} is of one that lz.save_quantized wrote, and "
            "config.json of another, written over it; to keep the other, move "
            f"{MANIFEST} and tensors-*.safetensors away; to keep the quantized one, write it again"
        )


def _layers(known: Generation, root: Path) -> dict[str, dict[str, Any]]:
    where = f"{root / MANIFEST}: {DOCUMENT}"
    found = known.documents.get(DOCUMENT)
    if not isinstance(found, Mapping):
        raise FileError(f"{root}: holds no quantized model (its manifest has no '{DOCUMENT}')")
    if found.get("format") != FORMAT:
        needs = str(found.get("readable_from", "another version"))[:20]
        raise FileError(
            f"{where}: format {str(found.get('format'))[:20]} is read by LeZero {needs} or newer; "
            f"this one reads format {FORMAT}"
        )
    return check_layers(found.get("layers"), where)


def _build(known: Generation, root: Path) -> Transformer:
    shape = known.documents.get("model")
    if shape is None:
        raise FileError(
            f"{root}: the model is no lezero.models.Transformer, so build it (best inside "
            "lezero.nn.meta.parameters_on_meta(); lezero.models.load_bert of the float folder for "
            "an encoder of ours) and give it: lz.load_quantized(folder, model). Answers by lz.LLM "
            "or a command need a model that lezero.models.load_hf (Llama, Mistral, Qwen2, Qwen3) "
            "opened before lz.quantize_, or one that lz.dequantize_ has made float again"
        )
    try:
        config = TransformerConfig.parse(shape, f"{root / MANIFEST}: model")
    except ValueError as error:
        raise FileError(str(error)) from None
    with torch.device("meta"):
        return Transformer(config)


@dataclass(frozen=True)
class _Bias:
    """A bias that a layer got when a batch norm was folded into it."""

    layer: str
    form: Form


def _stored(known: Generation) -> dict[str, Form]:
    return {
        name.removeprefix(PREFIX): form
        for name, form in known.forms.items()
        if name.startswith(PREFIX)
    }


def _expect(
    model: nn.Module, layers: Mapping[str, Mapping[str, Any]], known: Generation, root: Path
) -> list[_Bias]:
    """Checks, on a twin without memory, that the tensors are those of the rebuilt model."""
    rehearsal = twin(model)
    stored = _stored(known)
    biased = [
        _Bias(name, stored[f"{name}.bias"])
        for name, module in rehearsal.named_modules()
        if type(module) in (nn.Conv1d, nn.Conv2d)
        and module.bias is None
        and name not in layers
        and f"{name}.bias" in stored
    ]
    _give_biases(rehearsal, biased)
    try:
        rebuild_(rehearsal, layers)
    except FileError as error:
        raise FileError(f"{root}: {error}") from None
    wanted = {name: Form(x.dtype, tuple(x.shape)) for name, x in rehearsal.state_dict().items()}
    exact = {
        f"{name}.{key}" if name else key
        for name, module in rehearsal.named_modules()
        for key in _exact(module)
    }
    problems = [f"missing {name}" for name in wanted if name not in stored]
    problems += [
        f"{name}.bias is there, and the manifest says that there is none"
        for name, about in layers.items()
        if about.get("bias") is False and f"{name}.bias" in stored
    ]
    for name, form in stored.items():
        other = wanted.get(name)
        if other is None:
            problems.append(f"unexpected {name}")
        elif form.shape != other.shape:
            problems.append(f"{name} is {form.shape}, it should be {other.shape}")
        elif form.dtype != other.dtype and (
            name in exact or not (form.dtype.is_floating_point and other.dtype.is_floating_point)
        ):
            problems.append(f"{name} is {form.dtype}, it should be {other.dtype}")
    if not isinstance(model, Transformer):
        problems += missing_buffers(rehearsal, model)
    if problems:
        raise FileError(f"{root}: the tensors do not fit the model: {several(problems)}")
    return biased


def _exact(module: nn.Module) -> Sequence[str]:
    """The buffers whose type is never cast."""
    if isinstance(module, QuantizedWeight):
        return list(module._buffers)
    return SCALES if isinstance(module, QuantizedLayer) else ()


def _check_values(
    layers: Mapping[str, Mapping[str, Any]],
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    root: Path,
) -> None:
    named = {name.removeprefix(PREFIX): x for name, x in tensors.items()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if problems := unsound(named, layers, parameters):
        raise FileError(f"{root}: nothing can be computed with it: {several(problems)}")
    for name, about in layers.items():
        if about.get("weight") == "ordered":
            order = tensors[f"{PREFIX}{name}.weight.order"].sort().values
            if not torch.equal(
                order, torch.arange(len(order), dtype=order.dtype, device=order.device)
            ):
                raise FileError(f"{root}: '{name}.weight.order' is no order of its inputs")


def _give_biases(model: nn.Module, biased: list[_Bias]) -> None:
    for bias in biased:
        layer = model.get_submodule(bias.layer)
        device = next(layer.parameters()).device
        empty = torch.empty(bias.form.shape, dtype=bias.form.dtype, device=device)
        layer.register_parameter("bias", nn.Parameter(empty))


def _device(model: nn.Module) -> torch.device:
    """Where the model lies; one on meta comes to the CPU."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta:
            return tensor.device
    return torch.device("cpu")


__all__ = ["is_quantized_folder", "load_quantized"]
