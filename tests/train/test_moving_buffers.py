"""Which buffers are kept for a step that may be skipped, and what that costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lezero.optim import AdamW
from lezero.train.engine import Engine
from lezero.train.moving_buffers import MovingBuffers


class Graph(nn.Module):
    def __init__(self, adjacency: torch.Tensor) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)
        self.register_buffer("adjacency", adjacency)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.adjacency @ self.line(x)).square().mean()


@pytest.mark.filterwarnings("ignore:Sparse")  # CSR "is in beta state", and invariants unchecked
@pytest.mark.parametrize("sparse", ["to_sparse", "to_sparse_csr"])
@pytest.mark.parametrize("entries", [torch.eye(3), torch.ones(1, 1)])
def test_a_model_with_a_sparse_buffer_trains(sparse, entries):
    model = Graph(getattr(entries, sparse)())
    engine = Engine(model, AdamW(model, lr=1e-3), precision="fp32", compile="off")
    x = torch.ones(len(entries), 2)
    assert engine.train_step(x).skipped is None
    assert engine.train_step(x * torch.nan).skipped is not None
    assert torch.equal(model.adjacency.to_dense(), entries)


def test_a_buffer_that_each_pass_writes_onto_itself_is_compared_once(monkeypatch):
    model = nn.Module()
    model.register_buffer("table", torch.arange(4.0))
    compared, equal = [], torch.equal
    monkeypatch.setattr(torch, "equal", lambda *pair: compared.append(pair) or equal(*pair))
    buffers = MovingBuffers(model)
    for _ in range(4):
        buffers.keep()
        model.table.copy_(model.table.clone())  # as DDP broadcasts buffers
        buffers.settle()
    assert len(compared) == 1
    buffers.keep()
    model.table.fill_(torch.nan)
    buffers.put_back()
    assert model.table.tolist() == [0, 1, 2, 3]


class Refusing(nn.Module):
    """Moves running statistics before it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.refuses = nn.BatchNorm1d(2), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.norm(x).square().mean()
        if self.refuses:
            raise ValueError("not today")
        return loss


def test_a_step_that_raises_leaves_buffers_as_they_were():
    model = Refusing()
    engine = Engine(model, AdamW(model), precision="fp32", compile="off")
    engine.train_step(torch.randn(4, 2))
    before = model.norm.running_mean.clone()
    model.refuses = True
    with pytest.raises(ValueError, match="not today"):
        engine.train_step(torch.randn(4, 2) + 5)
    assert torch.equal(model.norm.running_mean, before)
