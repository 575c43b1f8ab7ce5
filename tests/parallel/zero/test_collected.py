"""What `no_sync` collected lasts through a backward that passes through the frozen model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lezero.core import groups
from lezero.core.errors import OrderError
from lezero.parallel.zero import Zero, no_sync, shard_, sharding_of
from lezero.parallel.zero import shard as shard_module
from tests.parallel.zero.test_models import gradients_of


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(2))

    def forward(self, x, branch):
        return self.layers[branch](x)


def adversary(stage):
    """As a discriminator does: collects, lets a generator's backward pass, and goes on."""
    torch.manual_seed(0)
    model = shard_(Branches(), Zero(stage=stage))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, found = torch.full((1, 4), 1.0 + groups.rank()), []
    for drop in (False, True):
        with no_sync(model):
            model(x, 0).sum().backward()
        model.requires_grad_(False)
        model(x.clone().requires_grad_(), 0).sum().backward()
        model.requires_grad_(True)
        if drop:
            optimizer.zero_grad()
        else:
            with pytest.raises(OrderError, match="collected under no_sync"):
                optimizer.step()
        model(x, 1).sum().backward()
        found += gradients_of(model).values()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("stage", range(4))
def test_a_backward_through_the_frozen_model_leaves_what_was_collected(ranks, stage):
    for first, second, dropped, last in ranks(2, adversary, stage):
        assert (first == 1.5).all()
        assert dropped is None
        assert (second == 1.5).all()
        assert (last == 1.5).all()


def apart(stage):
    """As `adversary`, in 16 bits and with branches of which each rank collects another."""
    shard_module.SOLO = 10
    torch.manual_seed(0)
    model = shard_(Branches(), Zero(stage=stage, compute="bf16"))
    x = torch.full((1, 4), 1.0 + groups.rank())
    with no_sync(model):
        model(x, groups.rank()).sum().backward()
    model.requires_grad_(False)
    model(x.clone().requires_grad_(), 0).sum().backward()
    model.requires_grad_(True)
    model(x, 0).sum().backward()
    assert not sharding_of(model).lent.wide
    return list(gradients_of(model).values())


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_collected_apart_meet_after_a_backward_through_the_frozen_model(ranks, stage):
    for first, second in ranks(2, apart, stage):
        assert (first == 2.0).all()
        assert (second == 1.0).all()
