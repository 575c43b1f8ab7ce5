"""The forms of a checkpoint that are compared: how each is saved and loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

FORMATS = ("lezero", "torch.save", "DCP", "safetensors")
Values = dict[str, Tensor]
TEMPLATE: Values = {}
"""Names, shapes and dtypes that DCP must be told before it loads."""

# One way to save and load each; the folder holds that one checkpoint.


def save_lezero(folder: Path, values: Values) -> None:
    from lezero.files import write_generation

    write_generation(folder, 1, tensors=values, documents={"state": {"step": 1}})


def load_lezero(folder: Path) -> Values:
    from lezero.files import list_generations, read_generation

    return read_generation(list_generations(folder)[-1]).tensors


def save_torch(folder: Path, values: Values) -> None:
    torch.save(values, folder / "checkpoint.pt")


def load_torch(folder: Path) -> Values:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def save_dcp(folder: Path, values: Values) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(values), checkpoint_id=folder, no_dist=True)


def load_dcp(folder: Path) -> Values:
    import torch.distributed.checkpoint as dcp

    values = {name: torch.zeros_like(tensor) for name, tensor in TEMPLATE.items()}
    dcp.load(values, checkpoint_id=folder, no_dist=True)
    return values


def save_safetensors(folder: Path, values: Values) -> None:
    from safetensors.torch import save_file

    save_file(values, folder / "model.safetensors")


def load_safetensors(folder: Path) -> Values:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


SAVE = dict(zip(FORMATS, (save_lezero, save_torch, save_dcp, save_safetensors), strict=True))
LOAD = dict(zip(FORMATS, (load_lezero, load_torch, load_dcp, load_safetensors), strict=True))
