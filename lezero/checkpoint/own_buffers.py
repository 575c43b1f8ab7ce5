"""Buffers that differ between ranks (statistics of batch norms, averages), into a checkpoint.

Rank 0's are among the model's tensors. Those of the others lie beside them, as
`buffers/<rank>/<name>`, for a resume with as many ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from lezero.core import groups
from lezero.core.tensors import flat_bytes


def pack_own_buffers(buffers: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """What this rank stores beside rank 0's `buffers`, and the names of all that differ.

    Every rank must call it together.
    """
    if groups.world_size() == 1:
        return {}, []
    mine = {name: _digest(value) for name, value in buffers.items() if _has_bytes(value)}
    every = groups.gather_objects(mine)
    differ = [name for name in mine if any(other.get(name) != mine[name] for other in every)]
    if groups.is_main():
        return {}, differ
    return {own_buffers_prefix() + name: buffers[name] for name in differ}, differ


def own_buffers_prefix() -> str:
    """What the names of this rank's begin with."""
    return f"buffers/{groups.rank()}/"


def _has_bytes(value: Tensor) -> bool:
    return value.layout == torch.strided and not value.is_meta


def _digest(value: Tensor) -> str:
    data = flat_bytes(value.detach().cpu().contiguous()).numpy().data
    return f"{value.dtype} {list(value.shape)} {hashlib.blake2b(data, digest_size=16).hexdigest()}"
