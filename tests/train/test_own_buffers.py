"""Buffers of a sharded model that differ between ranks, across a resume."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from safetensors.torch import load_file
from torch import nn

from lezero.checkpoint import export_weights, load
from lezero.checkpoint.own_buffers import _digest
from lezero.core import groups
from lezero.optim import AdamW
from lezero.parallel.zero import Zero, shard_
from lezero.train.engine import Engine


class Counting(nn.Module):
    """Buffers that differ between ranks, and feed training."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("alike", torch.ones(3))

    def forward(self, x):
        x = self.norm(self.first(x))
        if self.training:
            self.mean.lerp_(x.detach().amax(0), 0.1)
        return self.last(x - self.mean)


def with_buffers(stage, folder, do):
    """Three steps, then saves, or loads what was saved; and three more."""
    torch.manual_seed(0)
    model = shard_(Counting(), Zero(stage=stage))
    square = lambda model, x: model(x).square().mean()  # noqa: E731
    engine = Engine(
        model, AdamW(model, lr=1e-2), loss=square, counted="samples", precision="fp32",
        compile="off",
    )  # fmt: skip
    draw = torch.Generator().manual_seed(groups.rank())
    batches = [torch.randn(4, 6, generator=draw) + groups.rank() for _ in range(6)]
    if do == "save":
        for x in batches[:3]:
            engine.train_step(x)
        engine.save(folder)
    else:
        engine.load(folder)
    restored = [model.mean.tolist(), model.norm.running_mean.tolist()]
    losses = [engine.train_step(x).loss for x in batches[3:]]
    return losses, restored, model.mean.tolist()


@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_goes_on_with_its_own_buffers(ranks, tmp_path, stage):
    saved = ranks(2, with_buffers, stage, tmp_path, "save")
    assert saved[0][1] != saved[1][1]
    assert ranks(2, with_buffers, stage, tmp_path, "load") == saved
    stored = load(tmp_path)
    assert stored.documents["buffers"] == ["mean", "norm.running_mean", "norm.running_var"]
    assert set(stored.section("buffers/1")) == set(stored.documents["buffers"])
    for _, restored, _ in ranks(3, with_buffers, stage, tmp_path, "load"):
        assert restored == saved[0][1]
    export_weights(tmp_path, tmp_path / "weights.safetensors")
    weights = load_file(tmp_path / "weights.safetensors")
    assert weights["mean"].tolist() == saved[0][1][0]
    assert not any(name.startswith("buffers") for name in weights)


def test_one_value_of_a_row_has_the_digest_of_a_value_by_itself() -> None:
    column = torch.randn(1, 3)[:, 1]
    assert _digest(column) == _digest(column.clone(memory_format=torch.contiguous_format))
    assert _digest(column) != _digest(column + 1)
