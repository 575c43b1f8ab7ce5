"""What tensors hold in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def flat_bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as uint8 in one dimension; shares its memory.

    Of one value, torch calls any stride contiguous, and a copy keeps it, but `view` gives bytes
    only where it is 1.
    """
    assert x.is_contiguous()
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)


def parts(x: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that make up `x`: of a sparse one its indices and values, in its memory."""
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return x.ccol_indices(), x.row_indices(), x.values()
    return (x,)


def repeats(x: Tensor) -> bool:
    """Whether several of its elements are one in memory, as `expand` makes them: torch refuses to
    write to it."""
    return any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))
