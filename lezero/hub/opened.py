"""A language model from wherever it lies: a run, a Hugging Face folder, a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lezero import checkpoint
from lezero.compress.quantize import is_quantized_folder, load_quantized
from lezero.core.errors import FileError
from lezero.core.paths import expand_home
from lezero.files.generation import list_generations
from lezero.models import Transformer, TransformerConfig, load_gguf, load_hf


def open_model(
    place: str, dtype: torch.dtype | None = None, gguf_matrices: torch.dtype | None = None
) -> tuple[Transformer, Path | None]:
    """The model and the folder that holds its tokenizer; None: the tokenizer is in a GGUF file.

    `dtype` casts the weights of Hugging Face folders and GGUF files (fp32 there where it is not
    given); `gguf_matrices` those of two dims in GGUF files, in its place. Raises `FileError` when
    `place` is no model, or is damaged.
    """
    path = Path(expand_home(place))
    require_model(path)
    if path.is_file() and path.suffix == ".gguf":
        return load_gguf(path, dtype, matrices=gguf_matrices), None
    if (path / "config.json").is_file():
        if is_quantized_folder(path):
            model = load_quantized(path)
            return model if dtype is None else model.to(dtype), path
        return load_hf(path, dtype), path
    if not path.exists():
        raise FileError(f"{path}: no such file or folder")
    return _from_run(path)


def require_model(path: Path) -> None:
    """Raises `FileError` for a file or folder in which there is nothing that opens."""
    if path.is_file() and path.suffix != ".gguf":
        raise FileError(
            f"{path}: a file is a model where it is a .gguf one; give a run, a Hugging Face folder "
            "or a .gguf file"
        )
    if not path.is_dir() or (path / "config.json").is_file():
        return
    if checkpoint.is_generation(path) or list_generations(checkpoint.checkpoint_root(path)):
        return
    inside = next(iter(sorted(path.glob("*.gguf"))), None)
    raise FileError(
        f"{path}: holds no model; looked for config.json (of a Hugging Face folder) and for "
        f"checkpoints of a run; a GGUF file is named itself, as {inside or path / 'model.gguf'}"
    )


def _from_run(path: Path) -> tuple[Transformer, Path]:
    path = Path(os.path.abspath(path))  # what it lies in is looked for below
    loaded = checkpoint.load(path, select=lambda name: name.startswith("model/"))
    shape = loaded.documents.get("model")
    run = path if (path / "tokenizer").is_dir() else path.parent
    run = run if (run / "tokenizer").is_dir() else run.parent
    if shape is None or not (run / "tokenizer").is_dir():
        raise FileError(
            f"{path}: neither a run of the trainer, nor a Hugging Face folder, nor a .gguf file"
        )
    with torch.device("meta"):
        model = Transformer(TransformerConfig.parse(shape, f"{loaded.path}: model"))
    model.load_state_dict(loaded.section("model"), assign=True)
    model.rope.to_empty(device="cpu")  # its tables are not saved; this computes them
    return model, run / "tokenizer"
