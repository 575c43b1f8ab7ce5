"""Model weights out of a checkpoint, for programs that know nothing of LeZero."""

from __future__ import annotations

from pathlib import Path

import torch

from lezero.checkpoint.find import load
from lezero.core.errors import FileError
from lezero.files import write_tensor_file


def export_weights(source: str | Path, file: str | Path) -> list[str]:
    """Writes the model of a generation (or of a root's newest good one) as fp32 safetensors.

    Tensors are named as in the model; floating-point ones become fp32, others stay. Two names of
    one tensor are both written. Returns the names. Raises `FileError` when there is no model in it.
    """
    model = load(source, select=lambda name: name.startswith("model/")).section("model")
    if not model:
        raise FileError(f"{source}: holds no model weights (no tensor is called model/…)")
    weights = {
        name: tensor.to(torch.float32) if tensor.is_floating_point() else tensor
        for name, tensor in model.items()
    }
    write_tensor_file(Path(file), weights)
    return sorted(weights)
