"""Model weights out of a checkpoint, for programs that know nothing of LeZero.

Tensors are read, checked, cast and written one at a time, so the process holds one whole tensor and
never the whole model, however many ranks have written it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from lezero.checkpoint.find import checkpoint_root, is_generation
from lezero.checkpoint.masters import names_of_masters
from lezero.core.errors import CorruptError, FileError
from lezero.core.log import logger
from lezero.core.paths import expand_home
from lezero.files import (
    Form,
    Generation,
    list_generations,
    read_documents,
    read_generation,
    write_tensor_stream,
)
from lezero.models import TransformerConfig
from lezero.models.hf_writing import name_there, write_hf
from lezero.ops.adamw import reference

T = TypeVar("T")
_MODEL = "model/"


def export_weights(
    source: str | Path, file: str | Path, names: Callable[[str], str] | None = None
) -> list[str]:
    """Writes the model of a generation (or of a root's newest good one) as fp32 safetensors.

    Tensors are named as in the model, or what `names` makes of that; floating-point ones become
    fp32 (bf16 parameters with masters: the exact masters), others stay. Two names of one tensor are
    both written. Returns the names. Raises `FileError` when there is no model in it, or two tensors
    would get one name, and `CorruptError` for damage; then no file is written.
    """
    target = Path(expand_home(file))
    return _newest(source, lambda path: _export(path, target, names or str))


def export_hf(
    source: str | Path, folder: str | Path, tokenizer_folder: str | Path | None = None
) -> Path:
    """Writes the model of a run of the trainer as a Hugging Face folder in fp32; returns it.

    As `export_weights`, in one safetensors file. Raises `FileError` when the generation does not
    say what model it holds.
    """

    def write(path: Path) -> Path:
        shape = read_documents(path).get("model")
        if shape is None:
            raise FileError(f"{path}: does not say the model's shape; export_weights needs none")
        config = TransformerConfig.parse(shape, f"{path}: model")
        weights = lambda aside: _export(path, aside / "model.safetensors", name_there)  # noqa: E731
        return write_hf(config, folder, weights, tokenizer_folder=tokenizer_folder)

    return _newest(source, write)


def _newest(place: str | Path, write: Callable[[Path], T]) -> T:
    """What `write` makes of the generation itself, or of the newest good one of a root."""
    source = Path(expand_home(place))
    if is_generation(source):
        return write(source)
    root = checkpoint_root(source)
    paths = list_generations(root)
    if not paths:
        raise FileError(f"{root}: nothing to export, it holds no generation")
    for path in reversed(paths[1:]):
        try:
            return write(path)
        except CorruptError as error:
            logger("checkpoint").warning(f"{path.name} is not used: {error}")
    return write(paths[0])


def _export(path: Path, file: Path, names: Callable[[str], str]) -> list[str]:
    known = read_generation(path, select=lambda name: False)
    forms = known.forms
    found = {
        name.removeprefix(_MODEL): form for name, form in forms.items() if name.startswith(_MODEL)
    }
    if not found:
        raise FileError(f"{path}: holds no model weights (no tensor is called model/…)")
    called: dict[str, str] = {}
    for name in found:
        other = called.setdefault(names(name), name)
        if other != name:
            raise FileError(
                f"names: calls both '{other}' and '{name}' '{names(name)}'; give each tensor a "
                "name of its own"
            )
    listed = {}
    for new, name in called.items():
        dtype, shape = found[name]
        listed[new] = Form(torch.float32 if dtype.is_floating_point else dtype, shape)
    masters = names_of_masters(forms)
    write_tensor_stream(file, listed, lambda new: _weight(known, called[new], masters))
    return sorted(listed)


def _weight(known: Generation, name: str, masters: dict[str, str]) -> Tensor:
    own = _MODEL + name
    first = known.ties.get(own, own).removeprefix(_MODEL)
    wanted = {own, masters.get(first, own)}
    read = read_generation(known.path, select=lambda other: other in wanted).tensors
    weight = read.pop(own)
    if not weight.is_floating_point():
        return weight
    return reference.read(weight, next(iter(read.values()), None))
