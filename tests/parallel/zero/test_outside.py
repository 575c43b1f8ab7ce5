"""Gradients that reach parameters outside of the forward, of losses that the ranks have apart."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import lezero as lz
from lezero.comm.mesh import Mesh
from lezero.core import groups
from lezero.core.errors import OrderError
from lezero.parallel.zero import Zero, fsdp, shard_
from tests.parallel.zero.models import VOCAB, WIDTH, Tiny, batches, make
from tests.parallel.zero.test_fsdp import Sizes
from tests.parallel.zero.test_models import differences, gradients_of


class Headless(Tiny):
    """The loss applies the head, and a scale without dims."""

    def __init__(self, dims=0):
        super().__init__(blocks=2, tied=False)
        self.scale = torch.nn.Parameter(torch.full((1,) * dims, 1.5))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def taken(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def loss_of(model, tokens, weight=1.0):
    """Data and a penalty, of which each rank has another weight."""
    hidden = model(tokens[:, :-1])
    logits = F.linear(hidden, taken(model.head.weight)) * taken(model.scale).exp()
    data = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return weight * (data + 0.1 * taken(model.head.weight).pow(2).sum())


def outside(stage, axes, through_fsdp):
    if through_fsdp:
        fsdp.fits = lambda *_: True
    world, dims = groups.world_size(), int(through_fsdp)
    mesh = Mesh(axes) if axes else None
    model = shard_(make(Headless, torch.float64, dims=dims), Zero(stage=stage), mesh=mesh)
    plain = make(Headless, torch.float64, dims=dims)
    weights = [2 * (rank + 1) / (world + 1) for rank in range(world)]  # of mean 1
    for step in range(2):
        for rank in range(world):
            tokens = list(batches(2, world, rank))[step]
            (loss_of(plain, tokens, weights[rank]) / world).backward()
            if rank == groups.rank():
                loss_of(model, tokens, weights[rank]).backward()
    return list(differences(gradients_of(model), gradients_of(plain)))


@pytest.mark.parametrize(
    ("world", "stage", "axes", "through_fsdp"),
    [
        (2, 1, None, False),
        (2, 2, None, False),
        (4, 3, {"replicate": 2, "shard": 2}, False),
        (4, 3, {"replicate": 2, "shard": 2}, True),
    ],
)
def test_what_reaches_a_whole_parameter_is_averaged(ranks, world, stage, axes, through_fsdp):
    assert ranks(world, outside, stage, axes, through_fsdp, timeout_s=60) == [[]] * world


def before_the_forward(through_fsdp):
    """A penalty of all parameters, also of those that no rank's batch uses."""
    if through_fsdp:
        fsdp.fits = lambda *_: True
    model, plain = shard_(make(Sizes, torch.float64), Zero(stage=3)), make(Sizes, torch.float64)
    tokens = next(batches(1))
    for one in (model, plain):
        one.choose(0, 0)
        penalty = sum(taken(p).pow(2).sum() for p in one.parameters())
        (one(tokens).square().mean() + penalty).backward()
    assert plain.blocks[0].experts[0].weight.grad is not None
    return list(differences(gradients_of(model), gradients_of(plain)))


@pytest.mark.parametrize("through_fsdp", [False, True])
def test_a_penalty_before_the_forward_is_kept_where_no_rank_uses_the_parameter(ranks, through_fsdp):
    assert ranks(2, before_the_forward, through_fsdp) == [[], []]


def counted():
    """Steps of the Engine whose two ranks count 2 parts of a batch each, then 1 and 3."""

    def loss(model, batch):
        return model(batch["x"]).square().mean() + 0.01 * taken(model.head.weight).pow(2).sum()

    model = make(Tiny, torch.float64, tied=False)
    if groups.world_size() > 1:
        shard_(model, Zero(stage=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"precision": "fp32", "compile": "off", "attention": "torch"}
    engine = lz.Engine(model, optimizer, loss=loss, counted=lambda b: len(b["x"]), **options)
    x = torch.arange(4 * 5).reshape(4, 5) % VOCAB
    for cut in (2, 1):
        mine = x if groups.world_size() == 1 else (x[:cut], x[cut:])[groups.rank()]
        engine.train_step({"x": mine})
    return taken(model.head.weight.detach())


def test_the_engine_counts_a_penalty_once(ranks):
    plain = counted()
    assert plain.shape == (VOCAB, WIDTH)
    for found in ranks(2, counted):
        torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-12)


def refused():
    """Of three ranks, whose losses weigh 0.8, 1 and 1.2; then of ranks that count alike."""
    model = shard_(make(Tiny, torch.float64, tied=False), Zero(stage=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        penalty = taken(model.head.weight.pow(2).sum())
        return model(batch["x"]).square().mean() + 0.01 * penalty

    options = {"precision": "fp32", "compile": "off", "attention": "torch"}
    engine = lz.Engine(model, optimizer, loss=loss, counted=lambda b: len(b["x"]), **options)
    x = torch.arange(6 * 5).reshape(6, 5) % VOCAB
    told = r"weigh it by its own.*parameter.full_tensor\(\)"
    with pytest.raises(OrderError, match=told):
        engine.train_step({"x": x[: 4 + groups.rank()]})
    assert engine.train_step({"x": x}).step == 1


def test_every_rank_refuses_what_one_cannot_weigh_also_where_its_own_batch_is_the_mean(ranks):
    ranks(3, refused)
