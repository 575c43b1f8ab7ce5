"""Which buffers are kept for a step that may be skipped, and what that costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lezero.optim import AdamW
from lezero.train.engine import Engine


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


class Later(nn.Module):
    """Begins to move its statistics and a frozen parameter in the middle of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line = nn.BatchNorm1d(2), nn.Linear(2, 1)
        self.code = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.large = nn.Parameter(torch.zeros(1 << 20, 2), requires_grad=False)
        self.moves = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.train(self.moves)
        if self.moves:
            self.code.data.lerp_(x.mean(0), 0.5)  # torch counts no write through `.data`
            self.code.data = self.code.data.clone()
        return self.line(self.norm(x) + self.code).square().mean()


def test_what_first_moves_later_is_put_back_too():
    model = Later()
    engine = Engine(model, AdamW(model), precision="fp32", compile="off")
    good, bad = torch.randn(4, 2), torch.full((4, 2), torch.nan)
    for _ in range(3):
        assert engine.train_step(good).skipped is None
    model.moves = True
    before = model.norm.running_mean.clone()
    model.code.data.zero_()
    assert engine.train_step(bad).skipped is not None
    assert torch.equal(model.norm.running_mean, before)
    assert model.norm.num_batches_tracked == 0
    # A frozen parameter is known to move once it has done so in a step that counts.
    model.code.data.zero_()
    assert engine.train_step(good).skipped is None
    before = model.code.clone()
    assert engine.train_step(bad).skipped is not None
    assert torch.equal(model.code, before)
    kept = engine._buffers._moving
    assert {name for _, name in kept} == {"code"}


def test_a_frozen_parameter_may_go_and_another_come():
    model = Later()
    model.moves = True
    engine = Engine(model, AdamW(model), precision="fp32", compile="off")
    engine.train_step(torch.randn(4, 2))
    model.code = nn.Parameter(torch.zeros(2), requires_grad=False)
    del model.large
    assert engine.train_step(torch.full((4, 2), torch.nan)).skipped is not None
    assert not model.code.any()
    del model.code
    model.code = torch.zeros(2)
    model.moves = False
    assert engine.train_step(torch.randn(4, 2)).skipped is None
    assert "code" not in model._parameters


class Counted(nn.Module):
    """Replaces its running mean and its codebook, and counts samples in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.count, self.raises = nn.Linear(2, 1), 0, False
        self.register_buffer("mean", torch.zeros(2))
        self.code = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += len(x)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.code = nn.Parameter(self.code + x.mean(0), requires_grad=False)
        if self.raises:
            raise ValueError("not today")
        return self.line(x - self.mean + self.code).square().mean()


def test_what_is_replaced_is_put_back_whatever_is_counted_beside_it() -> None:
    model = Counted()
    engine = Engine(model, AdamW(model), precision="fp32", compile="off")
    assert engine.train_step(torch.randn(4, 2)).skipped is None
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert engine.train_step(torch.full((4, 2), torch.nan)).skipped is not None
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    model.raises = True
    with pytest.raises(ValueError, match="not today"):
        engine.train_step(torch.randn(4, 2))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


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


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_script_trains_and_its_buffers_are_put_back():
    frozen = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    model = nn.Sequential(torch.jit.script(frozen), nn.Linear(3, 1))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    engine = Engine(model, AdamW(model), loss=loss, precision="fp32", compile="off")
    assert engine.train_step(torch.randn(4, 2)).skipped is None
    before = {name: value.clone() for name, value in model.named_buffers()}
    assert engine.train_step(torch.full((4, 2), torch.nan)).skipped is not None
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
