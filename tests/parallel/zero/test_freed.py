"""A sharded model that nobody holds any more is freed, after it has computed too."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from lezero.parallel.zero import Zero, shard_, sharding_of
from tests.parallel.zero.models import Tiny, make


def kept(stage: int) -> list[bool]:
    """Whether each of three models is still there: never run, evaluated, trained."""
    models = []
    for way in range(3):
        model = make(Tiny)
        shard_(model, Zero(stage=stage))
        if way:
            with torch.set_grad_enabled(way == 2):
                loss = model(torch.arange(8).view(1, 8)).sum()
            if way == 2:
                loss.backward()
            del loss
        models.append(weakref.ref(model))
        sharding_of(model).close()
        del model
        gc.collect()
    return [model() is not None for model in models]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_it_is_freed(ranks, stage, world):
    assert ranks(world, kept, stage) == [[False] * 3] * world
