"""Quantized models as folders: written whole, read verified, without calibration code.

`docs/file-format.md` describes the layout: a generation of `lezero.files` (tensors with a digest
for every chunk, a sealed manifest) whose document `quantization` says what each layer is, beside
`config.json` and the tokenizer.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn

from lezero.compress.quantize.exported import export_compressed_tensors
from lezero.compress.quantize.forms import check_layers, several, unsound
from lezero.compress.quantize.imported import described_beside, import_quantized
from lezero.compress.quantize.layout import assign_, describe, missing_buffers, rebuild_
from lezero.compress.quantize.modules import (
    SCALES,
    QuantizedLayer,
    check_module,
    check_names,
    quantized_layers,
)
from lezero.compress.quantize.report import REPORT, QuantizationReport
from lezero.compress.quantize.tensors import kept_beside
from lezero.compress.quantize.weights import QuantizedWeight
from lezero.core.errors import ConfigError, FileError, NumericsError, OrderError
from lezero.core.interrupts import held_interrupts
from lezero.core.paths import expand_home
from lezero.files import (
    Form,
    Generation,
    commit_parts,
    read_documents,
    read_generation,
    step_of,
    write_part,
)
from lezero.files.folder import aside_for, cannot_write, contents, sync_files
from lezero.models import Transformer, TransformerConfig, token_entries, tokenizer_files
from lezero.models.hf_config import to_hf
from lezero.models.huggingface import read_json

Model = TypeVar("Model", bound=nn.Module)
FORMAT = 1
LAYOUTS = ("lezero", "compressed-tensors")
READABLE_FROM = "0.1.0"
_DOCUMENT, _PREFIX, _MANIFEST = "quantization", "model/", "manifest.json"
_SHOWN = 5


def save_quantized(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    tokenizer_folder: str | os.PathLike[str] | None = None,
    layout: Literal["lezero", "compressed-tensors"] = "lezero",
) -> Path:
    """Writes a model that went through `lz.quantize_` to `folder`, whole or not at all.

    layout: "lezero" keeps every bit and is what `lz.load_quantized` reads; "compressed-tensors" is
    for other servers (`lezero.compress.quantize.exported` says what it can hold). Files of a
    tokenizer are copied from `tokenizer_folder`, and what is said there of which tokens end a text
    and how tokens are chosen. A folder that was written by this in the same layout is replaced; any
    other that holds something, and one to which files were added, is refused. Raises `OrderError`
    when no layer is quantized, `ConfigError` for what a layout cannot hold, `NumericsError` for
    parameters that are NaN and scales that are no finite numbers, and `FileError`.
    """
    check_module(model, "lz.save_quantized")
    check_names(model, "lz.save_quantized")
    layers = describe(model)
    if all(about["kind"] == "folded" for about in layers.values()):
        raise OrderError("lz.save_quantized: no layer is quantized; call lz.quantize_ first")
    if layout not in LAYOUTS:
        raise ConfigError(f"layout: got {layout!r}, allowed are {', '.join(LAYOUTS)}")
    state = _state(model)
    if problems := unsound(state, layers, dict(model.named_parameters())):
        raise NumericsError(f"lz.save_quantized: {several(problems)}; mend the model first")
    root = Path(expand_home(folder)).absolute()
    if root.is_symlink():  # it stays, and what it names is written
        root = root.resolve()
    _check_target(root, layout)
    if layout == "compressed-tensors":
        return export_compressed_tensors(model, root, tokenizer_folder)
    copies = tokenizer_files(tokenizer_folder)
    documents: dict[str, Any] = {
        _DOCUMENT: {"format": FORMAT, "readable_from": READABLE_FROM, "layers": layers}
    }
    config = _config_json(model)
    said = {} if tokenizer_folder is None else token_entries(Path(expand_home(tokenizer_folder)))
    if isinstance(model, Transformer):
        documents["model"] = model.config.to_dict()
        config |= said
    else:
        config = said | config  # what its own config says counts
    report = model.__dict__.get(REPORT)
    if isinstance(report, QuantizationReport):
        documents["decisions"] = report.decisions.to_json()
    tensors = {_PREFIX + name: value for name, value in state.items()}
    try:
        with aside_for(root) as made:
            _write_beside(made, copies, config, documents.get("decisions"))
            part = write_part(made, "", tensors)
            commit_parts(made, root, step_of(root) or 0, [part], documents)
    except OSError as error:
        raise cannot_write(root, error) from error
    return root


def _write_beside(made: Path, copies: Sequence[Path], config: Any, decisions: Any) -> None:
    """What lies beside the tensors, durably."""
    for path in copies:
        shutil.copyfile(path, made / path.name)
    if config:
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (made / "config.json").write_text(text, encoding="utf-8")
    if decisions is not None:
        text = json.dumps(decisions, indent=1) + "\n"
        (made / "decisions.json").write_text(text, encoding="utf-8")
    sync_files(made)


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
    if not (root / _MANIFEST).is_file():
        return import_quantized(root, model)
    known = read_generation(root, select=lambda name: False)
    layers = _layers(known, root)
    if model is None:
        model = _build(known, root)
    biased = _expect(model, layers, known, root)
    wanted = {_PREFIX + name for name in _stored(known)}
    tensors = read_generation(root, select=wanted.__contains__).tensors
    _check_values(layers, tensors, model, root)
    device = _device(model)
    state = {name.removeprefix(_PREFIX): x.to(device) for name, x in tensors.items()}
    with held_interrupts():
        _give_biases(model, biased)
        rebuild_(model, layers)
        assign_(model, state)
    if isinstance(model, Transformer):
        model.rope.ready(1, torch.device("cpu"))
    return model.eval()


def is_quantized_folder(folder: str | os.PathLike[str]) -> bool:
    """Whether `load_quantized` is what opens a folder."""
    root = Path(expand_home(folder))
    config = root / "config.json"
    if not config.is_file():
        return False
    if (root / _MANIFEST).is_file():
        return True
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # whoever opens the folder says what is wrong with it
    if not isinstance(data, dict):
        return False
    return data.get("quantization_config") is not None or described_beside(root) is not None


def _check_target(root: Path, layout: str) -> None:
    """Raises `FileError` where something would be lost that this did not write."""
    if not root.exists():
        return
    if not root.is_dir():
        raise FileError(f"{root}: is a file; name a folder")
    there = contents(root)
    if not there:
        return
    found = _layout_of(root)
    if found != layout:
        what = "other files" if found is None else f"a model in the layout '{found}'"
        raise FileError(f"{root}: holds {what}; name a new folder")
    if layout == "lezero":  # the other leaves alone what it does not know
        ours = {_MANIFEST, "config.json", "decisions.json"}
        with suppress(FileError):
            ours |= {path.name for path in tokenizer_files(root)}
        strange = sorted(x for x in there - ours if not fnmatchcase(x, "tensors-*.safetensors"))
        if strange:
            raise FileError(
                f"{root}: holds other files ({', '.join(strange[:_SHOWN])}), which would be lost; "
                "move them, or name a new folder"
            )


def _layout_of(root: Path) -> str | None:
    """Of what layout the quantized model in a folder is; None where there is none."""
    try:
        if (root / _MANIFEST).is_file():
            return "lezero" if _DOCUMENT in read_documents(root) else None
        about = read_json(root / "config.json").get("quantization_config")
    except FileError:
        return None
    method = about.get("quant_method") if isinstance(about, dict) else None
    return method if method == "compressed-tensors" else None


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The `state_dict`, which has to be one of tensors."""
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"lz.save_quantized: '{name}' in the state_dict is a {type(value).__name__}, and a "
                "file holds tensors only; where get_extra_state of a module gives it, keep it in a "
                "buffer, or give a tensor there"
            )
    return state


def _config_json(model: nn.Module) -> dict[str, Any]:
    """What tells other programs what is in the folder, and that the weights are not theirs."""
    mark = {"quantization_config": {"quant_method": "lezero", "format": FORMAT}}
    if isinstance(model, Transformer):
        try:
            return {**to_hf(model.config, "float32"), **mark}
        except ConfigError:  # a shape that no other program knows; the manifest has it
            return mark
    described = getattr(getattr(model, "config", None), "to_dict", None)
    if not callable(described):
        return mark
    found = json.loads(json.dumps(described(), default=str))
    return {**found, **mark} if isinstance(found, dict) else mark


def _layers(known: Generation, root: Path) -> dict[str, dict[str, Any]]:
    where = f"{root / _MANIFEST}: {_DOCUMENT}"
    found = known.documents.get(_DOCUMENT)
    if not isinstance(found, Mapping):
        raise FileError(f"{root}: holds no quantized model (its manifest has no '{_DOCUMENT}')")
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
            f"{root}: the model is not of LeZero's own, so build it (best inside "
            "lezero.nn.meta.parameters_on_meta()) and give it: lz.load_quantized(folder, model)"
        )
    try:
        config = TransformerConfig.parse(shape, f"{root / _MANIFEST}: model")
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
        name.removeprefix(_PREFIX): form
        for name, form in known.forms.items()
        if name.startswith(_PREFIX)
    }


def _expect(
    model: nn.Module, layers: Mapping[str, Mapping[str, Any]], known: Generation, root: Path
) -> list[_Bias]:
    """Checks, on a twin without memory, that the tensors are those of the rebuilt model."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers(), *kept_beside(model)]:
        twin = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(twin) if isinstance(tensor, nn.Parameter) else twin
    rehearsal = copy.deepcopy(model, memo)
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
    named = {name.removeprefix(_PREFIX): x for name, x in tensors.items()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if problems := unsound(named, layers, parameters):
        raise FileError(f"{root}: nothing can be computed with it: {several(problems)}")
    for name, about in layers.items():
        if about.get("weight") == "ordered":
            order = tensors[f"{_PREFIX}{name}.weight.order"].sort().values
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


__all__ = ["is_quantized_folder", "load_quantized", "save_quantized"]
