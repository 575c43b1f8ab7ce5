"""What ZeRO cannot see is an error, never another block's weights or those of before."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch import nn
from torch.nn import functional as F

from lezero.core import groups
from lezero.core.errors import ConfigError, OrderError
from lezero.parallel.zero import Zero, clip_grad_norm_, shard_
from lezero.train import Engine
from tests.parallel.zero.models import HIDDEN, DeepSupervision, batches, loss_of, make


def hidden():
    """A loss that nobody can find in time: refused, not computed with another block's weights."""
    model = shard_(make(DeepSupervision, way="hidden"), Zero(stage=3))
    tokens = next(batches(1, 2, groups.rank()))
    loss, losses = loss_of(model, tokens), list(HIDDEN)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + sum(losses)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def total(model, tokens):
        HIDDEN.clear()
        return loss_of(model, tokens) + sum(HIDDEN)

    engine = Engine(model, optimizer, loss=total, counted="samples", compile="off")
    with pytest.raises(OrderError, match="return it from the block"):
        engine.train_step(tokens)


def test_a_loss_that_a_block_hides_is_refused_at_stage_3(ranks):
    ranks(2, hidden)


class Listed(nn.Module):
    """Computes with its weight twice, once from a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.kept = [self.inner.weight]

    def forward(self, x):
        return F.linear(self.inner(x), self.kept[0])


def listed(stage):
    model = shard_(nn.Sequential(nn.Linear(4, 4), Listed()), Zero(stage=stage))
    loss = model(torch.ones(2, 4)).sum()
    if stage == 0:
        loss.backward()
        return
    with pytest.raises(OrderError, match=r"'1.inner.weight' was replaced .* Read it from the mod"):
        loss.backward()


@pytest.mark.parametrize("stage", range(4))
def test_a_parameter_that_something_keeps_beside_the_model_is_refused(stage, ranks):
    ranks(2, listed, stage)


def surrounded():
    inner, head = shard_(nn.Linear(4, 4)), nn.Linear(4, 4)
    whole = nn.Sequential(inner, head)
    whole(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ConfigError, match=r"2 of 4 parameters are of no sharded model"):
        clip_grad_norm_(whole, 1.0)
    clip_grad_norm_(inner, 1.0)
    clip_grad_norm_(head, 1.0)


def test_a_clipping_over_more_than_the_sharded_model_is_refused(ranks):
    ranks(2, surrounded)
