"""Quantized models as folders, written whole.

`docs/file-format.md` describes the layout: a generation of `lezero.files` (tensors with a digest
for every chunk, a sealed manifest) whose document `quantization` says what each layer is, beside
`config.json` and the tokenizer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from lezero.compress.quantize.exported import WRITER, export_compressed_tensors
from lezero.compress.quantize.forms import several, unsound
from lezero.compress.quantize.layout import (
    DOCUMENT,
    FORMAT,
    MANIFEST,
    PREFIX,
    READABLE_FROM,
    describe,
)
from lezero.compress.quantize.modules import check_module, check_names
from lezero.compress.quantize.report import REPORT, QuantizationReport
from lezero.core.errors import ConfigError, FileError, NumericsError, OrderError
from lezero.core.paths import expand_home
from lezero.data.special import read_object
from lezero.files import commit_parts, read_documents, step_of, write_part
from lezero.files.folder import aside_for, cannot_write, contents, sync_files
from lezero.models import Transformer, token_entries, tokenizer_files
from lezero.models.hf_config import UNFINISHED, to_hf
from lezero.models.huggingface import SINGLE, read_json
from lezero.models.sentence_files import sentence_files

LAYOUTS = ("lezero", "compressed-tensors")
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
    tokenizer are copied from `tokenizer_folder`, and what is said there of which tokens end a text,
    how tokens are chosen and, in the first layout, how sentence-transformers makes vectors of
    texts. A folder that was written by this in the same layout is replaced; any other that holds
    something, and one to which files were added, is refused. Raises `OrderError` when no layer is
    quantized or some have no values, `ConfigError` for what a layout cannot hold, `NumericsError`
    for parameters that are NaN and scales that are no finite numbers, and `FileError`.
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
    there = _check_target(root, layout)
    if layout == "compressed-tensors":
        return export_compressed_tensors(model, root, tokenizer_folder, gone=there)
    copies, said = beside_tokenizer(tokenizer_folder)
    documents: dict[str, Any] = {
        DOCUMENT: {"format": FORMAT, "readable_from": READABLE_FROM, "layers": layers}
    }
    config = _config_json(model)
    if isinstance(model, Transformer):
        documents["model"] = model.actual_config.to_dict()
        config |= said
    else:
        config = _tokenizer_class(tokenizer_folder) | said | config  # its own config counts
    report = model.__dict__.get(REPORT)
    if isinstance(report, QuantizationReport):
        documents["decisions"] = report.decisions.to_json()
    tensors = {PREFIX + name: value for name, value in state.items()}
    try:
        with aside_for(root) as made:
            _write_beside(made, copies, config, documents.get("decisions"))
            part = write_part(made, "", tensors)
            commit_parts(made, root, step_of(root) or 0, [part], documents)
    except OSError as error:
        raise cannot_write(root, error) from error
    return root


def beside_tokenizer(
    folder: str | os.PathLike[str] | None,
) -> tuple[list[tuple[Path, str]], dict[str, Any]]:
    """What comes along from a tokenizer's folder: files, with where each goes, and entries of
    config.json; none of None. `FileError` where it holds no tokenizer, or one that is damaged."""
    if folder is None:
        return [], {}
    copies = [(path, path.name) for path in tokenizer_files(folder)] + sentence_files(folder)
    return copies, token_entries(Path(expand_home(folder)))


def _write_beside(
    made: Path, copies: Sequence[tuple[Path, str]], config: Any, decisions: Any
) -> None:
    """What lies beside the tensors, durably. copies: files, and where each goes."""
    for path, name in copies:
        (made / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, made / name)
    if config:
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (made / "config.json").write_text(text, encoding="utf-8")
    if decisions is not None:
        text = json.dumps(decisions, indent=1) + "\n"
        (made / "decisions.json").write_text(text, encoding="utf-8")
    sync_files(made)


def _check_target(root: Path, layout: str) -> set[str]:
    """The files that are replaced; raises `FileError` where something would be lost, or lie beside
    a model it has nothing to do with, that this did not write."""
    if not root.exists():
        return set()
    if not root.is_dir():
        raise FileError(f"{root}: is a file; name a folder")
    there = contents(root)
    if not there:
        return there
    found = _layout_of(root)
    if found != layout:
        what = "other files" if found is None else f"a model in the layout '{found}'"
        raise FileError(f"{root}: holds {what}; name a new folder")
    if layout == "lezero":
        ours, weights = {MANIFEST, "config.json", "decisions.json"}, "tensors-*.safetensors"
        ours |= _sentence_names(root)
    else:
        ours, weights = {"config.json"}, SINGLE
    with suppress(FileError):
        ours |= {path.name for path in tokenizer_files(root)}
    strange = sorted(x for x in there - ours if not fnmatchcase(x, weights))
    if strange:
        raise FileError(
            f"{root}: holds other files ({', '.join(strange[:_SHOWN])}), which would be lost; "
            "move them, or name a new folder"
        )
    return there


def _tokenizer_class(folder: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Which of transformers' tokenizers reads a folder's files, where config.json says it."""
    found = {} if folder is None else read_object(Path(expand_home(folder)) / "config.json")
    return {name: found[name] for name in ("tokenizer_class",) if name in found}


def _sentence_names(root: Path) -> set[str]:
    """What says in a folder how texts become vectors; a stage's folder if no more is in it."""
    names = {Path(name) for _, name in sentence_files(root)}
    whole = (x for x in names if len(x.parts) == 1 or os.listdir(root / x.parent) == [x.name])
    return {name.parts[0] for name in whole}


def _layout_of(root: Path) -> str | None:
    """In what layout the quantized model in a folder is that this wrote; None where none is."""
    try:
        if (root / MANIFEST).is_file():
            return "lezero" if DOCUMENT in read_documents(root) else None
        said = read_json(root / "config.json")
    except FileError:
        return None
    about = said.get("quantization_config")
    method = about.get("quant_method") if isinstance(about, dict) else None
    ours = method == "compressed-tensors" and (UNFINISHED in said or WRITER.items() <= said.items())
    return method if ours else None


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
        if value.is_meta:
            raise OrderError(
                f"lz.save_quantized: '{name}' has no values (it is on the meta device); fill the "
                "model first, as lz.load_quantized does"
            )
    return state


def _config_json(model: nn.Module) -> dict[str, Any]:
    """What tells other programs what is in the folder, and that the weights are not theirs."""
    mark = {"quantization_config": {"quant_method": "lezero", "format": FORMAT}}
    if isinstance(model, Transformer):
        try:
            return {**to_hf(model.actual_config, "float32"), **mark}
        except ConfigError:  # a shape that no other program knows; the manifest has it
            return mark
    described = getattr(getattr(model, "config", None), "to_dict", None)
    if not callable(described):
        return mark
    found = json.loads(json.dumps(described(), default=str))
    return {**found, **mark} if isinstance(found, dict) else mark


__all__ = ["save_quantized"]
