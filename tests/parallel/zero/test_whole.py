"""Whole weights into shards."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks

from lezero.parallel.zero import Zero, materialize_, shard_, sharding_of
from tests.parallel.zero.models import Tiny, whole


def loaded_whole():
    """Whole weights, of another seed and all but one, into a model sharded on meta and not."""
    torch.manual_seed(7)
    state = Tiny().state_dict()
    kept = state.pop("blocks.1.up.bias")
    wrong = []
    for stage in range(4):
        for meta in (False, True):
            with torch.device("meta" if meta else "cpu"):
                model = Tiny()
            shard_(model, Zero(stage=stage))
            if meta:
                materialize_(model, lambda m: [p.fill_(3) for p in m.parameters(recurse=False)])
            before = whole(model)
            answer = model.load_state_dict(state, strict=False)
            assert answer.missing_keys == ["blocks.1.up.bias"]
            assert not answer.unexpected_keys
            now = whole(model)
            wanted = state | {"blocks.1.up.bias": before["blocks.1.up.bias"]}
            wrong += [name for name in now if not torch.equal(now[name], wanted[name])]
            with pytest.raises(RuntimeError, match="size mismatch for scale"):
                model.load_state_dict(state | {"blocks.1.up.bias": kept, "scale": torch.ones(3)})
            sharding_of(model).close()
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_whole_weights_load_into_shards(ranks, world):
    assert ranks(world, loaded_whole) == [[]] * world
