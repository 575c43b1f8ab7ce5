"""Whole weights into shards, and shards into copies and files."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch._dynamo  # loaded once, for all ranks
from torch import nn

from lezero.core import groups
from lezero.parallel.zero import Zero, fsdp, full_state_dict, materialize_, shard_, sharding_of
from tests.parallel.zero.models import Tiny, Vectors, batches, loss_of, make, whole


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


def kept_weights(stage):
    """The weights of a good step, kept as a copy of `state_dict()` and in torch's file."""
    model = shard_(make(), Zero(stage=stage))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = next(batches(1))
    good, best = whole(model), copy.deepcopy(model.state_dict())
    kept = sum(getattr(v, "_local_tensor", v).untyped_storage().nbytes() for v in best.values())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    expected = loss_of(model, tokens).item()
    wrong = []
    for source in (lambda: best, lambda: torch.load(io.BytesIO(file.getvalue()))):
        loss_of(model, tokens).backward()
        optimizer.step()
        now = whole(model)
        wrong += [name for name, value in good.items() if torch.equal(value, now[name])]
        model.load_state_dict(source())
        now = whole(model)
        wrong += [name for name, value in good.items() if not torch.equal(value, now[name])]
        wrong += ["loss"] * (loss_of(model, tokens).item() != expected)
    return wrong, kept


@pytest.mark.parametrize("stage", range(4))
def test_weights_that_were_kept_come_back(ranks, stage):
    total = sum(value.nbytes for value in Tiny().state_dict().values())
    for wrong, kept in ranks(2, kept_weights, stage):
        assert wrong == []
        assert kept <= total * (1 if stage == 0 else 0.6) + 8  # only what the rank has


def assigned(use):
    """`assign=True` with an optimizer from before the load, or from after it; and after steps."""
    if use == "FSDP2":
        fsdp.fits = lambda *_: True
    for late in (False, True):
        model, plain = shard_(make(Vectors), Zero(stage=3 if use == "FSDP2" else use)), Vectors()
        state = copy.deepcopy(plain.state_dict())
        for _ in range(2):
            if late:
                model.load_state_dict(state, assign=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model.load_state_dict(state, assign=True)
            plain.load_state_dict(state)
            assert all(torch.equal(value, state[name]) for name, value in whole(model).items())
            for one in (model, plain):
                one.zero_grad()
                loss_of(one, next(batches(1))).backward()
            optimizer.step()
            torch.optim.SGD(plain.parameters(), lr=0.1).step()
            now = whole(model)
            for name, parameter in plain.named_parameters():
                torch.testing.assert_close(now[name], parameter.detach())
        rows = {name: value.clone() for name, value in model.blocks[1].state_dict().items()}
        with torch.no_grad():
            for parameter in model.blocks[1].parameters():
                parameter.zero_()
        model.blocks[1].load_state_dict(rows, assign=True)
        assert all(torch.equal(value, now[name]) for name, value in whole(model).items())
        sharding_of(model).close()


@pytest.mark.parametrize("use", [0, 3, "FSDP2"])
def test_weights_that_a_load_would_assign_are_copied(ranks, use):
    ranks(2, assigned, use)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.seen = nn.Linear(4, 4), [0]

    def forward(self, x):
        self.seen[0] += len(x)
        return self.first(x)

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def extra_state(stage):
    """What a plain module takes from a sharded one's state, which goes on counting."""
    model = shard_(Counting(), Zero(stage=stage))
    model(torch.ones(3 + groups.rank(), 4)).sum().backward()
    state = full_state_dict(model)
    model(torch.ones(5, 4))
    if not groups.is_main():
        return state
    plain = Counting()
    plain.load_state_dict(state)
    return plain.seen


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whole_weights_come_with_extra_state(ranks, stage):
    assert ranks(2, extra_state, stage) == [[3], {}]
