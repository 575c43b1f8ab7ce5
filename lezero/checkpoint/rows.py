"""Tensors that are split over ranks by rows, as checkpoints see them: DTensors on a mesh.

A checkpoint knows whole tensors and rows of them, never stages or ranks. What one rank has of a
DTensor is rows `start` … `stop` of its dim 0; state that belongs to a parameter and has as many
rows is split alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lezero.core.errors import FileError
from lezero.files import Slice

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_split(tensor: object) -> bool:
    """Whether `tensor` is a DTensor; its class is loaded only where there may be one."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "placements")


def rows_of(name: str, tensor: DTensor) -> tuple[int, int]:
    """The rows of the whole tensor that this rank has. `FileError` for one not split by rows."""
    start, stop = 0, tensor.shape[0] if tensor.dim() else 1
    mesh = tensor.device_mesh
    cuts = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    for dim in cuts:
        if len(cuts) > 1 or not tensor.placements[dim].is_shard(0):
            raise FileError(
                f"tensor '{name}': placed as {tensor.placements}; allowed are tensors that one "
                "axis of a mesh splits by rows, Shard(0)"
            )
        each = -(-stop // mesh.size(dim))
        first = min(mesh.get_local_rank(dim) * each, stop)
        start, stop = first, min(first + each, stop)
    return start, stop


def slices(
    tensors: Mapping[str, Tensor], first: bool
) -> tuple[dict[str, Tensor], dict[str, Slice]]:
    """What this rank writes of `tensors`: plain tensors, and which of them are rows of larger ones.

    Whole tensors are written by the `first` rank, and rows by the first rank that has them.
    """
    found: dict[str, Tensor] = {}
    places: dict[str, Slice] = {}
    for name, tensor in tensors.items():
        if not is_split(tensor):
            if first:
                found[name] = tensor
            continue
        split: Any = tensor
        start, stop = rows_of(name, split)
        copies = [i for i, p in enumerate(split.placements) if p.is_replicate()]
        if any(split.device_mesh.get_local_rank(i) for i in copies) or (start == stop and start):
            continue
        found[name] = split.detach().to_local()
        places[name] = Slice(tuple(split.shape), start)
    return found, places


def split_like(rows: Tensor, like: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """`rows` of this rank as a DTensor of `shape`, split as `like` is; as they are for a plain one.

    Nothing is copied.
    """
    if not is_split(like):
        return rows
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    whole = torch.Size(shape)
    stride = torch.empty(whole, device="meta").stride()
    mesh, placements = like.device_mesh, like.placements
    made: Tensor = DTensor.from_local(
        rows, mesh, placements, run_check=False, shape=whole, stride=stride
    )
    return made
