"""The state of a plain run's optimizer goes on in a sharded one."""

from __future__ import annotations

import copy

import pytest
import torch

from lezero.core import groups
from lezero.optim import AdamW, AdamW8bit
from lezero.parallel.zero import Zero, shard_, sharding_of
from tests.parallel.zero.models import batches, loss_of, make, whole

KINDS = {
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5),
    "fused": lambda model: AdamW(model.parameters(), lr=1e-2),
    "masters": lambda model: AdamW(model.parameters(), lr=1e-2, masters="remainder"),
    "8 bits": lambda model: AdamW8bit(model.parameters(), lr=1e-2),
}


def trained(model, optimizer, first, last):
    for tokens in list(batches(last, groups.world_size(), groups.rank()))[first:]:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def gone_on(kind, stage):
    """Trained in one go, and after two steps with what a plain run would have saved; twice."""
    options = {"width": 72, "dtype": torch.bfloat16 if kind == "masters" else torch.float32}
    expected = shard_(make(**options), Zero(stage=0))
    optimizer = KINDS[kind](expected)
    trained(expected, optimizer, 0, 2)
    saved = copy.deepcopy((expected.state_dict(), optimizer.state_dict()))
    trained(expected, optimizer, 2, 4)
    model = shard_(make(**options), Zero(stage=stage))
    optimizer = KINDS[kind](model)
    found = []
    for _ in range(2):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        trained(model, optimizer, 2, 4)
        found.append(whole(model))
    wanted = whole(expected)
    sharding_of(model).close()
    return [name for one in found for name in one if not close(one[name], wanted[name], kind)]


def close(one, other, kind):
    """Torch's fused kernels round the ends of rows otherwise."""
    if kind in ("masters", "8 bits"):
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_takes_its_rows_of_state_that_was_whole(ranks, kind, stage):
    assert ranks(2, gone_on, kind, stage) == [[], []]
