"""What stage 3 cannot do is an error, never another block's weights."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks

from lezero.core import groups
from lezero.core.errors import OrderError
from lezero.parallel.zero import Zero, shard_
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
