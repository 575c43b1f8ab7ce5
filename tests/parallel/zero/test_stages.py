"""Every stage on one to four ranks: like one process, and like each other bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # the first optimizer step loads it; here it is loaded once for all ranks

from lezero.core import groups
from lezero.parallel.zero import Zero, clip_grad_norm_, shard_, sharding_of
from tests.parallel.zero.models import Tiny, batches, loss_of, make, plain_losses, whole


def train(stage, steps, dtype=torch.float32, compute="auto", max_norm=0.5, **options):
    """Losses, norms and the last parameters of a run on this rank's part of each batch."""
    model = shard_(make(dtype=dtype, **options), Zero(stage=stage, compute=compute))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses, norms = [], []
    for tokens in batches(steps, groups.world_size(), groups.rank()):
        loss = loss_of(model, tokens)
        loss.backward()
        if max_norm:
            norms.append(float(clip_grad_norm_(model, max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = groups.all_reduce_sum(torch.stack(losses)) / groups.world_size()
    return mean.tolist(), norms, whole(model)


def all_stages(*args, **options):
    return [train(stage, *args, **options) for stage in range(4)]


@pytest.mark.parametrize("world", [1, 3, 4])
def test_equal_to_one_process_in_fp64(ranks, world):
    expected, parameters = plain_losses(6, max_norm=0.5)
    for losses, _, found in ranks(world, all_stages, 6, torch.float64)[0]:
        assert losses == pytest.approx(expected, rel=1e-10, abs=0)
        for name, value in parameters.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("world", "compute"), [(2, "auto"), (4, "bf16")])
def test_stages_agree_bit_for_bit_over_50_steps(ranks, world, compute):
    stages = ranks(world, all_stages, 50, compute=compute, width=64, blocks=2, timeout_s=120)
    for losses, norms, found in stages[-1]:
        assert losses == stages[0][0][0]
        assert norms == stages[0][0][1]
        assert all(torch.equal(found[name], value) for name, value in stages[0][0][2].items())


def shards():
    """What each rank holds at each stage."""
    found = []
    for stage in range(4):
        model = shard_(make(), Zero(stage=stage))
        sharding = sharding_of(model)
        local = {name: tuple(sharding.local(name).shape) for name in sharding.parameters}
        found.append((local, sharding.layout, list(model.state_dict())))
    return found


def test_what_each_rank_holds(ranks):
    names = list(make().state_dict())
    for rank, stages in enumerate(ranks(3, shards)):
        for stage, (local, layout, state) in enumerate(stages):
            assert state == names
            assert set(layout) == set(names)
            rows = (7, 7, 5)[rank] if stage else 19
            assert local["embed.weight"] == (rows, 12)
            assert local["scale"] == ()
            assert layout["head.weight"] == layout["embed.weight"]
            start = (0, 7, 14)[rank] if stage else 0
            assert layout["embed.weight"] == ((19, 12), start, start + rows)


def gathered_ahead():
    """While each block but the last computes: whether the next has begun to be gathered."""
    model = shard_(make(blocks=4), Zero(stage=3))
    found = []
    for block, following in zip(model.blocks, sharding_of(model).units[1:-1], strict=False):
        block.norm.register_forward_hook(
            lambda *_, unit=following: found.append(unit.gathering or unit.valid)
        )
    with torch.no_grad():
        for tokens in batches(2):
            model(tokens)
    return found


def test_the_next_block_is_gathered_while_one_computes(ranks):
    """From the second forward on, when it is known which one is next."""
    assert ranks(2, gathered_ahead) == [[False] * 3 + [True] * 3] * 2


class Dropping(Tiny):
    """Leaves a layer out, on each rank another."""

    def forward(self, tokens):
        x, me = self.embed(tokens), groups.rank()
        for index, block in enumerate(self.blocks):
            if index != me:
                x = block(x)
        return self.head(self.norm(x)) * self.scale


def layers_left_out(stage):
    model = shard_(make(Dropping), Zero(stage=stage))
    found = []
    for changed in (None, model, model.blocks[0]):
        with torch.no_grad():
            for parameter in changed.parameters() if changed else ():
                parameter.mul_(0.5)
        loss_of(model, next(batches(1))).backward()
        model.zero_grad()
        found.append(whole(model))
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_may_leave_out_layers_from_the_first_forward_on(ranks, stage):
    """And after a change of all, or of one layer that a rank leaves out: what lasts is gathered
    whole, whatever a rank goes on to."""
    (first, halved, last), other = ranks(2, layers_left_out, stage)
    for name, value in first.items():
        assert torch.equal(value, other[0][name])
        assert torch.equal(halved[name], value / 2)
        assert torch.equal(halved[name], other[1][name])
        again = name.startswith("blocks.0.")
        assert torch.equal(last[name], halved[name] / 2 if again else halved[name])
        assert torch.equal(last[name], other[2][name])
