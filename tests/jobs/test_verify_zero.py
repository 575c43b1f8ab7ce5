"""`verify` of sharded runs: every stage and wire, and what a broken exchange looks like."""

import pytest

from lezero.comm.link import Link
from tests.jobs.verify_runs import rank_verifies_each

PLAIN = [{"zero": {"stage": stage}} for stage in range(4)]
HALF = [{"zero": {"stage": stage}, "precision": "bf16"} for stage in (1, 3)]
KINDS = [
    {"zero": {"stage": 3}, "precision": "bf16", "masters": "remainder"},
    {"zero": {"stage": 2}, "precision": "bf16", "masters": "fp32", "optimizer": "adamw8bit"},
]
FLAT = {"topology": "flat"}
WIRES = [
    {"zero": {"stage": 2}, "wire": {"codec": "bf16"}},
    {"zero": {"stage": 0}, "wire": {"codec": "int8", "feedback": "both"}},
    {"zero": {"stage": 2}, "wire": {"codec": "int4"}},
    {"zero": {"stage": 1}, "wire": {"codec": "int4", "feedback": "worker"}},
    {"zero": {"stage": 3}, "wire": {"codec": "sign", "feedback": "worker", **FLAT}},
    {"zero": {"stage": 2}, "wire": {"codec": "topk:0.05", "feedback": "both"}},
    {
        "zero": {"stage": 3},
        "wire": {"codec": "2:4-int8", "feedback": "worker", "feedback_dtype": "int8"},
    },
    {
        "zero": {"stage": 1},
        "wire": {"codec": "int8", "feedback": "worker", "feedback_dtype": "bf16"},
    },
    {"zero": {"stage": 3, "compute": "bf16"}, "wire": {"gather": "int8"}},
]


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


def test_no_stage_is_accused(ranks, text, tmp_path):
    cases = [*PLAIN, *HALF, *KINDS]
    for config, (verdict, first, table) in zip(
        cases, told(ranks, text, tmp_path, [(None, one) for one in cases]), strict=True
    ):
        assert verdict == "within tolerance", (config, first)
        assert "bit for bit as uninterrupted" in table


def test_no_wire_is_accused(ranks, text, tmp_path):
    for config, (verdict, first, table) in zip(
        WIRES, told(ranks, text, tmp_path, [(None, one) for one in WIRES], 4), strict=True
    ):
        assert verdict == "within tolerance", (config, first)
        assert "bit for bit as uninterrupted" in table


@pytest.mark.parametrize("fault", [dropped, doubled], ids=lambda fault: fault.__name__)
def test_a_broken_sum_is_caught_at_every_stage(ranks, text, tmp_path, fault):
    wires = [WIRES[2], WIRES[4], WIRES[6]]
    cases = [*PLAIN, *HALF, *wires]
    for config, (verdict, first, _) in zip(
        cases, told(ranks, text, tmp_path, [(fault, one) for one in cases], 1), strict=True
    ):
        assert verdict == "parts", config
        assert first.startswith("step 1, gradient of layers.0."), (config, first)


def test_a_stale_gather_is_caught_at_every_stage(ranks, text, tmp_path):
    cases = [*PLAIN[1:], *HALF, WIRES[3], WIRES[8]]
    for config, (verdict, first, _) in zip(
        cases, told(ranks, text, tmp_path, [(stale, one) for one in cases]), strict=True
    ):
        assert verdict == "parts", config
        assert first.startswith(("step 2, loss", "step 2, gradient")), (config, first)
