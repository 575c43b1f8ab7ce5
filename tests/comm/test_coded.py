"""Encoded wires against the same arithmetic in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from lezero.comm.codec import codec
from lezero.comm.link import Link
from lezero.comm.mesh import Mesh
from lezero.comm.route import Span
from lezero.comm.wire import Wire
from lezero.core import groups
from lezero.core.errors import ConfigError
from tests.comm.test_link import values
from tests.ranks import RankPool

NUMEL = 3 * 131  # a chunk that no block divides


def expected(wire: Wire, steps: int, dtype: torch.dtype, world: int, reduce: bool) -> torch.Tensor:
    """The sum after `steps` steps, as the ranks compute it. reduce: all-reduce, encoded twice."""
    coder = codec(wire.codec)
    length = NUMEL
    worker = [torch.zeros(world * length) for _ in range(world)]
    server = [torch.zeros(length) for _ in range(world)]
    for step in range(steps):
        flats = [values(rank, world * length, dtype, seed=step) for rank in range(world)]
        sums = []
        for owner in range(world):
            part = slice(owner * length, owner * length + length)
            total = torch.zeros(0)
            for rank in range(world):
                decoded = flats[rank][part].float()
                if rank != owner:
                    payload = torch.empty(coder.bytes(length), dtype=torch.uint8)
                    error = worker[rank][part] if wire.feedback != "none" else None
                    coder.encode(flats[rank][part], payload, error)
                    coder.decode(payload, decoded)
                total = decoded if rank == 0 else total + decoded
            if reduce:
                payload = torch.empty(coder.bytes(length), dtype=torch.uint8)
                coder.encode(total, payload, server[owner] if wire.feedback == "both" else None)
                total = torch.empty(length, dtype=dtype)
                coder.decode(payload, total)
            sums.append(total.to(dtype))
    return torch.cat(sums)


def encoded(fields: dict[str, Any], dtype: torch.dtype) -> None:
    rank, world = groups.rank(), groups.world_size()
    wire = Wire(**fields)
    with Link(wire, Mesh({"shard": world}), "shard") as link:
        assert link.topology == "flat"
        whole, out = torch.empty(0), torch.empty(NUMEL, dtype=dtype)
        both = wire.feedback == "both"
        for step in range(3):
            flat = values(rank, world * NUMEL, dtype, seed=step)
            if not both:
                link.reduce_scatter(flat, out, key="g").wait()
            whole = flat.clone()
            if both or wire.feedback == "none":
                link.all_reduce(whole, key="g").wait()
        if not both:
            exact = expected(wire, 3, dtype, world, reduce=False)
            assert torch.equal(out, exact[rank * NUMEL : rank * NUMEL + NUMEL])
        if both or wire.feedback == "none":
            assert torch.equal(whole, expected(wire, 3, dtype, world, reduce=True))
        assert link.feedback is None or link.feedback.nbytes() > 0
        link.reduce_scatter(
            torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype), key="e"
        ).wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {"codec": "int8"},
        {"codec": "int4", "feedback": "worker"},
        {"codec": "bf16"},
        {"codec": "sign", "feedback": "both"},
        {"codec": "topk:0.1", "feedback": "both"},
        {"codec": "2:4-int4", "feedback": "worker"},
    ],
    ids=lambda fields: "-".join(fields.values()),
)
def test_the_same_bits_as_in_one_process(
    ranks: RankPool, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    ranks(3, encoded, {**fields, "topology": "flat"}, dtype)


def stored(dtype: str) -> float:
    """The mean over 40 steps of what arrives, against the truth: feedback makes it right."""
    rank, world = groups.rank(), groups.world_size()
    wire = Wire(codec="int4", feedback="worker", feedback_dtype=dtype, topology="flat")
    flat = values(rank, world * NUMEL, torch.float32)
    exact = sum(values(other, world * NUMEL, torch.float32) for other in range(world))
    mine = slice(rank * NUMEL, rank * NUMEL + NUMEL)
    total, out = torch.zeros(NUMEL), torch.empty(NUMEL)
    with Link(wire, Mesh({"shard": world}), "shard") as link:
        for _ in range(40):
            link.reduce_scatter(flat, out, key="g").wait()
            total += out
        link.reduce_scatter(flat, out, key="g").wait()
    once = (out - exact[mine]).abs().mean()
    return float((total / 40 - exact[mine]).abs().mean() / once)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_feedback_makes_the_mean_right(ranks: RankPool, dtype: str) -> None:
    assert max(ranks(2, stored, dtype)) < 0.2


def gathered() -> None:
    rank, world = groups.rank(), groups.world_size()
    with Link(Wire(gather="int8"), Mesh({"shard": world}), "shard") as link:
        for dtype in (torch.float32, torch.bfloat16):
            shard = values(rank, NUMEL, dtype)
            out = torch.empty(world * NUMEL, dtype=dtype)
            link.all_gather(shard, out, key="p").wait()
            assert torch.equal(shard, values(rank, NUMEL, dtype))
            for other in range(world):
                coder, part = codec("int8"), torch.empty(NUMEL, dtype=dtype)
                payload = torch.empty(coder.bytes(NUMEL), dtype=torch.uint8)
                coder.encode(values(other, NUMEL, dtype), payload)
                coder.decode(payload, part)
                assert torch.equal(out[other * NUMEL : other * NUMEL + NUMEL], part)
            with pytest.raises(ConfigError, match="lies in out"):
                link.all_gather(out[rank * NUMEL : rank * NUMEL + NUMEL], out, key="p")
        flat = values(rank, world * NUMEL, torch.float32)
        link.all_reduce(flat, key="g").wait()  # gradients go as they are
        exact = values(0, world * NUMEL, torch.float32)
        for other in range(1, world):
            exact += values(other, world * NUMEL, torch.float32)
        assert torch.equal(flat, exact)


def test_gathered_parameters_are_the_same_on_every_rank(ranks: RankPool) -> None:
    ranks(2, gathered)


def hierarchical(fields: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Four ranks as two hosts of two."""
    rank = groups.rank()
    wire = Wire(topology="hierarchical", **fields)
    found = []
    with Link(wire, Mesh({"shard": 4}), "shard", hosts=[[0, 1], [2, 3]]) as link:
        assert link.topology == "hierarchical"
        for staged in (False, True):
            flat = torch.empty(4 * NUMEL) if staged else link.buffer(4 * NUMEL, torch.float32)
            flat.copy_(values(rank, 4 * NUMEL, torch.float32))
            out = torch.empty(NUMEL)
            pending = [link.reduce_scatter(flat, out, key="g")]
            whole = torch.empty(4 * NUMEL) if staged else link.buffer(4 * NUMEL, torch.float32)
            shard = values(rank, NUMEL, torch.float32, seed=9)
            pending.append(link.all_gather(shard, whole, key="p"))
            for one in pending[::-1]:
                one.wait()
            link.all_reduce(flat, key="g").wait()
            found += [out.clone(), whole.clone(), flat.clone()]
        sent = dict(link.account.total)
    return found, sent


def test_hosts_are_summed_first(ranks: RankPool) -> None:
    results = ranks(4, hierarchical, {})
    flats = [values(rank, 4 * NUMEL, torch.float32) for rank in range(4)]
    total = (flats[0] + flats[1]) + (flats[2] + flats[3])
    shards = torch.cat([values(rank, NUMEL, torch.float32, seed=9) for rank in range(4)])
    for rank, (found, sent) in enumerate(results):
        for out, whole, reduced in (found[:3], found[3:]):
            assert torch.equal(out, total[rank * NUMEL : rank * NUMEL + NUMEL])
            assert torch.equal(whole, shards)
            assert torch.equal(reduced, total)
        # Each byte leaves a host once: one partner, two chunks, four bytes an element, twice.
        assert sent["reduce_scatter"] == sent["all_gather"] == 2 * NUMEL * 4
        assert sent["all_reduce"] == 2 * 2 * NUMEL * 4


def test_hosts_are_summed_first_and_then_encoded(ranks: RankPool) -> None:
    results = ranks(4, hierarchical, {"codec": "int8", "gather": "fp16"})
    flats = [values(rank, 4 * NUMEL, torch.float32) for rank in range(4)]
    total = (flats[0] + flats[1]) + (flats[2] + flats[3])
    for found, sent in results:
        for reduced in (found[2], found[5]):
            assert torch.equal(reduced, results[0][0][2])
            assert (reduced - total).abs().max() < 0.03 * total.abs().max()
        assert torch.equal(found[1], results[0][0][1])
        assert sent["reduce_scatter"] == 2 * codec("int8").bytes(NUMEL)
        assert sent["all_gather"] == 2 * NUMEL * 2


def refused(topology: str, hosts: list[list[int]]) -> str:
    made = len(distributed_c10d._world.pg_names)
    with pytest.raises(ConfigError) as caught:
        Link(Wire(topology=topology), Mesh({"shard": 3}), "shard", hosts=hosts)
    assert len(distributed_c10d._world.pg_names) == made
    return str(caught.value)


def test_hosts_that_do_not_suit_are_told(ranks: RankPool) -> None:
    for text in ranks(3, refused, "hierarchical", [[0, 1], [2]]):
        assert "'hierarchical' needs several hosts with equally many ranks" in text
        assert "[0, 1], [2]" in text
    assert "'shared' needs all ranks to share" in ranks(3, refused, "shared", [[0, 1], [2]])[2]
    for hosts in ([[0, 1], [2], [3]], [[0, 0], [1, 2]], [[0, 1]], [], [0, 1, 2], [["a"]]):
        for text in ranks(3, refused, "auto", hosts):
            assert text.startswith(f"hosts: got {hosts}; allowed are lists that hold each of the p")


def padded(topology: str, hosts: list[list[int]] | None) -> set[str]:
    """Whose errors a rank keeps of a buffer whose last three quarters are padding."""
    wire = Wire(codec="int4", feedback="both", topology=topology)
    with Link(wire, Mesh({"shard": 4}), "shard", hosts=hosts) as link:
        flat = torch.zeros(4 * NUMEL)
        flat[:NUMEL] = values(groups.rank(), NUMEL, torch.float32)
        link.all_reduce(flat, key="bucket", spans=(Span("a", 0, NUMEL, 0),)).wait()
        link.all_reduce(torch.zeros(4), key="b", spans=()).wait()
        assert link.feedback is not None
        return {key.split("/")[1] for key in link.feedback.state_dict()}


@pytest.mark.parametrize(
    ("topology", "hosts"), [("flat", None), ("hierarchical", [[0, 1], [2, 3]])]
)
def test_padding_has_no_name(ranks: RankPool, topology: str, hosts: list[list[int]] | None) -> None:
    found = ranks(4, padded, topology, hosts)
    assert set().union(*found) == {"a"}
