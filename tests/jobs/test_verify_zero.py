"""`verify` of sharded runs: every stage and wire, and what a broken exchange looks like."""

import pytest
import torch

from lezero.comm.link import Link
from lezero.parallel.zero import fsdp, shard_, sharding_of
from lezero.train import recipe
from tests.jobs.verify_runs import rank_verifies_each

PLAIN = [{"zero": {"stage": stage}} for stage in range(4)]
HALF = {"zero": {"stage": 3}, "precision": "bf16"}
REMAINDER = {"zero": {"stage": 3}, "precision": "bf16", "masters": "remainder"}
EIGHT_BIT = {"zero": {"stage": 2}, "precision": "bf16", "optimizer": "adamw8bit"}
INT4 = {"zero": {"stage": 2}, "wire": {"codec": "int4"}}
BOTH = {"zero": {"stage": 0}, "wire": {"codec": "topk:0.05", "feedback": "both"}}
SIGN = {
    "zero": {"stage": 3},
    "wire": {"codec": "sign", "feedback": "worker", "feedback_dtype": "bf16"},
}
GATHER = {
    "zero": {"stage": 3},
    "precision": "bf16",
    "wire": {"codec": "int8", "feedback": "worker", "gather": "int8"},
}


def over_fsdp2(patch, divided_by=None):
    """As ranks with accelerators do it: the model is whole first, then FSDP2 splits it."""
    build = recipe.build_model

    def whole_first(config, vocab, decisions=None):
        model = build(config.model_copy(update={"zero": None}), vocab)
        if config.zero is not None:
            shard_(model, recipe.zero_of(config, torch.device("cpu"), decisions))
            assert isinstance(sharding_of(model), fsdp.FsdpSharding)
            if divided_by is not None:
                model.set_force_sum_reduction_for_comms(True)
                model.set_gradient_divide_factor(divided_by)
        return model

    patch.setattr(fsdp, "fits", lambda *_: True)
    patch.setattr(recipe, "build_model", whole_first)


class Then:
    """A collective after which something goes wrong."""

    def __init__(self, pending, spoil):
        self.pending, self.spoil, self.done = pending, spoil, False

    def wait(self):
        self.pending.wait()
        if not self.done:
            self.done = True
            self.spoil()

    def poll(self):
        self.wait()
        return True


def first_block(key):
    return key.startswith("layers.0.")


def dropped(patch):
    """The first block's gradients are never summed: a rank keeps its own."""
    scatter, reduce = Link.reduce_scatter, Link.all_reduce

    def reduce_scatter(self, flat, out, *, key, spans=()):
        mine = flat.view(self.size, -1)[self.rank].to(out.dtype, copy=True)
        pending = scatter(self, flat, out, key=key, spans=spans)
        return Then(pending, lambda: out.copy_(mine)) if first_block(key) else pending

    def all_reduce(self, flat, *, key, spans=()):
        mine = flat.clone()
        pending = reduce(self, flat, key=key, spans=spans)
        return Then(pending, lambda: flat.copy_(mine)) if first_block(key) else pending

    patch.setattr(Link, "reduce_scatter", reduce_scatter)
    patch.setattr(Link, "all_reduce", all_reduce)


def doubled(patch):
    """The first block's gradients are added twice."""
    scatter, reduce = Link.reduce_scatter, Link.all_reduce

    def reduce_scatter(self, flat, out, *, key, spans=()):
        pending = scatter(self, flat, out, key=key, spans=spans)
        return Then(pending, lambda: out.mul_(2)) if first_block(key) else pending

    def all_reduce(self, flat, *, key, spans=()):
        pending = reduce(self, flat, key=key, spans=spans)
        return Then(pending, lambda: flat.mul_(2)) if first_block(key) else pending

    patch.setattr(Link, "reduce_scatter", reduce_scatter)
    patch.setattr(Link, "all_reduce", all_reduce)


def stale(patch):
    """What other ranks hold of the first block stays as it was gathered first."""
    gather, old = Link.all_gather, {}

    def all_gather(self, shard, out, *, key):
        pending = gather(self, shard, out, key=key)
        if not first_block(key):
            return pending
        chunk = out.numel() // self.size

        def keep():
            theirs = [r for r in range(self.size) if r != self.rank]
            for rank in theirs:
                part = out[rank * chunk : (rank + 1) * chunk]
                if (id(self), key, rank) in old:
                    part.copy_(old[id(self), key, rank])
                else:
                    old[id(self), key, rank] = part.clone()

        return Then(pending, keep)

    patch.setattr(Link, "all_gather", all_gather)


def told(ranks, text, folder, cases, steps=2):
    env = {"LEZERO_CACHE": str(text / "cache")}
    every = ranks(2, rank_verifies_each, text, folder, cases, steps, timeout_s=180, env=env)
    assert every[0] == every[1]
    return every[0]


def healthy(ranks, text, folder, cases, steps):
    everything = told(ranks, text, folder, [(None, one) for one in cases], steps)
    for config, (verdict, first, table) in zip(cases, everything, strict=True):
        assert verdict == "within tolerance", (config, first)
        assert "bit for bit as uninterrupted" in table, (config, table)


def caught(ranks, text, folder, fault, cases, steps):
    everything = told(ranks, text, folder, [(fault, one) for one in cases], steps)
    for config, (verdict, first, _) in zip(cases, everything, strict=True):
        assert verdict == "parts", config
        yield config, first


def test_no_stage_is_accused(ranks, text, tmp_path):
    healthy(ranks, text, tmp_path, [*PLAIN, HALF, REMAINDER, EIGHT_BIT], 2)


def test_no_wire_is_accused(ranks, text, tmp_path):
    healthy(ranks, text, tmp_path, [INT4, BOTH, SIGN, GATHER], 3)


@pytest.mark.parametrize(
    ("fault", "cases"), [(dropped, [*PLAIN, INT4, SIGN]), (doubled, [*PLAIN, HALF, BOTH])]
)
def test_a_broken_sum_is_caught(ranks, text, tmp_path, fault, cases):
    for config, first in caught(ranks, text, tmp_path, fault, cases, 1):
        assert first.startswith("step 1, gradient of layers.0."), (config, first)


def test_a_stale_gather_is_caught(ranks, text, tmp_path):
    for config, first in caught(ranks, text, tmp_path, stale, [*PLAIN[1:], HALF, GATHER], 2):
        assert first.startswith(("step 2, loss", "step 2, gradient")), (config, first)


def summed_over_fsdp2(patch):
    """The sums of the two ranks' gradients, where their mean is wanted."""
    over_fsdp2(patch, divided_by=1.0)


def test_fsdp2_is_judged_too(ranks, text, tmp_path):
    config = {"zero": {"stage": 3}}
    cases = [(over_fsdp2, config), (over_fsdp2, HALF), (summed_over_fsdp2, config)]
    *right, wrong = told(ranks, text, tmp_path, cases)
    for verdict, first, table in right:
        assert verdict == "within tolerance", first
        assert "bit for bit as uninterrupted" in table
    assert wrong[1].startswith("step 1, gradient of "), wrong
