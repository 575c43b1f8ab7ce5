"""Reads a file of weights into named tensors, without ever running code from it.

safetensors files go through the safetensors library, which checks the header's bounds; `.pt` and
`.pth` files go through `torch.load(weights_only=True)`, memory-mapped where the file's format
allows it. Everything else is refused with the reason and what to do.
"""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lezero.core.errors import FileError
from lezero.core.paths import expand_home
from lezero.nn.versions import versioned, versions_in

_RESAVE = "load it where you trust it and save its state dict: torch.save(model.state_dict(), "
_REFUSED = {
    ".bin": "the suffix does not say what it is, and such files are often pickles, which can run "
    "code. If torch.save wrote a state dict into it, rename it to .pt (it is then loaded with "
    "weights_only=True); better, save it as .safetensors",
    ".ckpt": "a training checkpoint is a pickle of many objects, which can run code; "
    f"{_RESAVE}'model.pt')",
    ".pkl": f"a pickle can run code; {_RESAVE}'model.pt')",
    ".pickle": f"a pickle can run code; {_RESAVE}'model.pt')",
    ".onnx": "an ONNX file holds a graph, not a state dict of this module",
    ".h5": "an HDF5 file (Keras) names and lays out its weights differently; convert it first",
    ".keras": "a Keras file names and lays out its weights differently; convert it first",
    ".gguf": "a GGUF file is not a state dict of a module; load it with "
    "lezero.models.load_gguf(path)",
    ".npz": "an .npz file is not read here; save the arrays with safetensors.numpy.save_file",
    ".json": "a JSON file holds no weights; name the .safetensors file (of a sharded model, load "
    "the folder with lezero.models.load_hf)",
}
_ALLOWED = "allowed is one .safetensors file, or a .pt or .pth file with a state dict"


def read_weights(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tensors of one file by name, on the CPU; they may be views of the mapped file.

    Raises `FileError` with the reason and the remedy for whatever cannot be read or is refused.
    """
    file = Path(expand_home(path))
    suffix = file.suffix.lower()
    try:
        if file.is_dir():
            raise FileError(
                f"{file}: is a folder; {_ALLOWED}. A Hugging Face folder loads with "
                "lezero.models.load_hf(folder)"
            )
        if suffix in _REFUSED:
            raise FileError(f"{file}: refused: {_REFUSED[suffix]}; {_ALLOWED}")
        if suffix not in (".safetensors", ".pt", ".pth"):
            raise FileError(f"{file}: refused: unknown kind '{suffix}'; {_ALLOWED}")
        if not file.exists():
            raise FileError(f"{file}: no such file")
        if not file.is_file():
            raise FileError(f"{file}: is no regular file; {_ALLOWED}")
        if file.stat().st_size == 0:
            raise FileError(f"{file}: is empty; it was perhaps never fully written or copied")
        return _safetensors(file) if suffix == ".safetensors" else _torch(file)
    except OSError as error:
        raise FileError(f"{file}: cannot be read ({error.strerror or error})") from None


def _safetensors(file: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(file))
    except SafetensorError as error:
        raise FileError(
            f"{file}: is no valid safetensors file ({error}); it may be cut short or another kind "
            "of file under this name"
        ) from None
    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError) as error:
        # What the library's torch side raises, for example for a type that torch lacks.
        raise FileError(f"{file}: holds tensors that torch cannot take ({error!r})") from None


def _torch(file: Path) -> dict[str, Any]:
    with open(file, "rb"):
        zipped = zipfile.is_zipfile(file)
    damaged = _damaged(file) if zipped else ""
    if damaged:
        raise FileError(
            f"{file}: is damaged: the record '{damaged}' does not have the checksum that the file "
            "gives for it; copy or save it again"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns of here is refused below
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # the unpickler raises nearly anything on hostile bytes
        raise FileError(f"{file}: refused: {_why_not(error)}") from None
    return _state_dict(file, loaded)


def _damaged(file: Path) -> str:
    """The first record whose checksum is wrong, which torch does not look at; "" where none is, or
    all are: torch can be told to write none."""
    wrong, sound = "", False
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED or not record.file_size:
                    continue  # torch refuses what is packed
                try:
                    with archive.open(record) as content:
                        while content.read(1 << 22):
                            pass
                    sound = True
                except zipfile.BadZipFile:
                    wrong = wrong or record.filename
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError):
        return ""  # torch says what is wrong with it
    return wrong if sound else ""


def _why_not(error: Exception) -> str:
    """Why a weights-only load failed, without torch's advice to switch the safety off."""
    text = str(error)
    if "TorchScript" in text:
        return (
            "it is a TorchScript archive, which holds code; save the state dict of the "
            "original module: torch.save(model.state_dict(), 'model.pt')"
        )
    found = re.search(r"(?:GLOBAL|class|function)\s+([\w.]*\w+\.\w+)", text)
    if found:
        return (
            f"besides tensors it wants to load '{found[1]}'. A pickle like that can run code, so "
            f"only state dicts are loaded; if you trust where it came from, {_RESAVE}'model.pt')"
        )
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    reason = "" if "weights_only" in text else f" ({first[:120]})"
    return (
        f"it does not load as a state dict{reason}; it may be cut short, or a pickle of "
        "something else, which can run code. If you trust where it came from, "
        f"{_RESAVE}'model.pt')"
    )


def _state_dict(file: Path, loaded: object) -> dict[str, Any]:
    if not isinstance(loaded, Mapping):
        raise FileError(
            f"{file}: holds a {type(loaded).__name__}, not a state dict; "
            "save model.state_dict() into it"
        )
    inner = [key for key, value in loaded.items() if _is_state_dict(value)]
    if inner and not _is_state_dict(loaded):
        raise FileError(
            f"{file}: is a checkpoint of several things; the weights seem to be under "
            f"{', '.join(map(repr, inner))}. Save that part alone: "
            f"torch.save(torch.load({file.name!r}, weights_only=True)[{inner[0]!r}], 'model.pt')"
        )
    wrong = [
        key
        for key, value in loaded.items()
        if not isinstance(key, str)
        or not (isinstance(value, torch.Tensor) or key.endswith("_extra_state"))
    ]
    if wrong:
        value = loaded[wrong[0]]
        raise FileError(
            f"{file}: is no state dict: {wrong[0]!r} holds a {type(value).__name__}, and a state "
            "dict maps names to tensors; save model.state_dict() into it"
        )
    return versioned(loaded, versions_in(loaded))


def _is_state_dict(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(key, str) for key in value)
        and any(isinstance(item, torch.Tensor) for item in value.values())
    )
