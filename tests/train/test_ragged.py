"""Batches of fewer rows than micro-batches, as the last one of a DataLoader."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lezero.core import groups
from lezero.parallel.zero import fsdp
from lezero.train.engine import Engine
from tests.train.test_distributed import ROWS, assert_agree, global_batches, plain_masked_mean
from tests.train.test_zero import make, whole

FORMS = (None, 0, 1, 2, 3, "fsdp2")


def rows_of_this_rank(batch):
    """Ten of the twelve rows on rank 0, and two on rank 1."""
    first = groups.rank() * (ROWS - 2)
    last = ROWS if groups.rank() == groups.world_size() - 1 else ROWS - 2
    return {key: value[first:last] for key, value in batch.items()}


def steps(form=None, accumulate=1, masked=()):
    if form == "fsdp2":
        fsdp.fits = lambda *_: True
    stage = 3 if form == "fsdp2" else form
    engine = make(stage, accumulate=accumulate, clip=0.3, precision="auto", loss=plain_masked_mean)
    given = (rows_of_this_rank(batch) for batch in global_batches(4, masked))
    results = [engine.train_step(batch) for batch in given]
    return [(r.loss, r.grad_norm, r.tokens) for r in results], whole(engine)


def every_form(masked):
    return [steps(form, 4, masked) for form in FORMS]


@pytest.mark.parametrize("masked", [(), (11,), (10, 11)], ids=["all", "last", "rank"])
def test_a_rank_with_few_rows_agrees_with_one_process(ranks, masked):
    alone = steps(masked=masked)
    assert_agree(alone, steps(None, 20, masked))
    for rank in ranks(2, every_form, masked):
        for found in rank:
            assert_agree(alone, found)


def test_the_last_batch_of_an_epoch_may_be_short():
    runs = []
    for accumulate in (1, 4):
        torch.manual_seed(0)
        model, seen = torch.nn.Linear(8, 4).double(), []

        def loss(model, batch, seen=seen):
            seen.append(len(batch[0]))
            return F.cross_entropy(model(batch[0]), batch[1])

        engine = Engine(
            model, torch.optim.SGD(model.parameters(), lr=0.1), counted="samples",
            accumulate=accumulate, precision="fp32", compile="off", loss=loss,
        )  # fmt: skip
        data = TensorDataset(torch.randn(19, 8).double(), torch.randint(4, (19,)))
        for batch in DataLoader(data, batch_size=16):
            engine.train_step(tuple(batch))
        runs.append((model.weight.detach(), seen))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=0, atol=1e-12)
    assert [run[1] for run in runs] == [[16, 3], [4, 4, 4, 4, 1, 1, 1]]
