"""Buffers that are no plain memory, when rank 0's values come to all."""

from __future__ import annotations

import pytest
import torch

from lezero.core import groups
from lezero.core.errors import UnlikeError
from lezero.parallel.zero import shard_
from tests.parallel.zero.models import make


def kept():
    """What buffers are after sharding, on ranks that had other values."""
    me = groups.rank()
    dense = torch.tensor([[0.0, 1.0 + me], [2.0, 0.0]]).roll(me, 0)
    model = make()
    for name, buffer in {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 1)),
        "expanded": (dense[0] + 3).expand(2, 2),
    }.items():
        model.register_buffer(name, buffer, persistent=False)
    shard_(model)
    model.expanded.add_(1)  # it is written to, as a state is loaded
    return {name: (b.layout, b.to_dense().tolist()) for name, b in model.named_buffers()}


def test_sparse_and_expanded_buffers_have_rank_0s_values(ranks):
    """Torch refused to take their memory for plain one, with several ranks alone."""
    first, second = ranks(2, kept)
    assert first == second
    assert first.pop("expanded") == (torch.strided, [[4.0, 5.0], [4.0, 5.0]])
    assert [layout for layout, _ in first.values()] == [
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
    ]
    assert all(values == [[0.0, 1.0], [2.0, 0.0]] for _, values in first.values())


def unlike():
    model = make()
    model.register_buffer(
        "adjacency", (torch.eye(2) * torch.tensor([1, groups.rank()])).to_sparse()
    )
    with pytest.raises(UnlikeError, match=r"shape of buffer 'adjacency' is .* on rank 0 but"):
        shard_(model)


def test_sparse_buffers_of_other_sizes_are_told(ranks):
    ranks(2, unlike)
