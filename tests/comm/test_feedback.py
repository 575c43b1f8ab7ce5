"""Kept errors by name and offset: other buffers, other numbers of ranks, other storage."""

from __future__ import annotations

import pytest
import torch

from lezero.comm.feedback import SERVER, WORKER, Feedback, cut
from lezero.comm.link import Link
from lezero.comm.mesh import Mesh
from lezero.comm.route import Span, Spans
from lezero.comm.wire import Wire
from lezero.core import groups
from tests.comm.test_link import values
from tests.ranks import RankPool

CPU = torch.device("cpu")
# Two parameters of 100 and 57 elements; the buffer is padded to a multiple of every world size.
LENGTHS = {"a.weight": 100, "b/odd.bias": 57}
NUMEL = 168


def spans_of(order: list[str]) -> Spans:
    at, found = 0, []
    for name in order:
        found.append(Span(name, 0, LENGTHS[name], at))
        at += LENGTHS[name]
    return tuple(found)


def by_name(buffer: torch.Tensor, spans: Spans) -> dict[str, torch.Tensor]:
    return {s.name: buffer[s.at : s.at + s.stop - s.start].clone() for s in spans}


def test_spans_are_cut_where_a_chunk_ends() -> None:
    spans = spans_of(["a.weight", "b/odd.bias"])
    assert cut(spans, 90, 120, 0) == (
        Span("a.weight", 90, 100, 0),
        Span("b/odd.bias", 0, 20, 10),
    )
    assert cut(spans, 157, 168, 0) == ()
    assert cut(spans, 0, 10, 50) == (Span("a.weight", 0, 10, 50),)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_other_buffers_find_the_same_errors(dtype: str) -> None:
    kept = Feedback(0, 2, dtype, CPU)
    spans = spans_of(["a.weight", "b/odd.bias"])
    error = kept.error(WORKER, "bucket", NUMEL, spans)
    error.copy_(torch.randn(NUMEL).to(error.dtype))
    kept.keep(WORKER, "bucket", error)
    before = by_name(kept.error(WORKER, "bucket", NUMEL, spans).float(), spans)
    other = spans_of(["b/odd.bias", "a.weight"])
    after = by_name(kept.error(WORKER, "bucket", NUMEL, other).float(), other)
    parts = {}
    for span in other:  # then each in a buffer of its own, in two pieces
        length = span.stop - span.start
        pieces = (Span(span.name, 0, 30, 3), Span(span.name, 30, length, 40))
        moved = kept.error(WORKER, f"own {span.name}", NUMEL, pieces).float()
        parts[span.name] = torch.cat([moved[3:33], moved[40 : 40 + length - 30]])
    for name in LENGTHS:
        if dtype == "int8":  # blocks fall elsewhere, so it is rounded again
            assert torch.allclose(after[name], before[name], atol=0.05)
            assert torch.allclose(parts[name], before[name], atol=0.1)
        else:
            assert torch.equal(after[name], before[name])
            assert torch.equal(parts[name], before[name])
    assert len(kept.state_dict()) == 4
    assert kept.fresh(WORKER, "own a.weight")
    assert not kept.fresh(WORKER, "own a.weight")


def run(world_wire: Wire, steps: int, first: int) -> Link:
    rank, world = groups.rank(), groups.world_size()
    return train(Link(world_wire, Mesh({"shard": world}), "shard"), rank, steps, first)


def train(link: Link, rank: int, steps: int, first: int) -> Link:
    spans = spans_of(["a.weight", "b/odd.bias"])
    for step in range(first, first + steps):
        flat = values(rank, NUMEL, torch.float32, seed=step)
        flat[157:] = 0
        if link.wire.feedback == "both":
            link.all_reduce(flat, key="bucket", spans=spans).wait()
        else:
            out = torch.empty(NUMEL // link.size)
            link.reduce_scatter(flat, out, key="bucket", spans=spans).wait()
    return link


State = dict[str, torch.Tensor]


def segment(fields: dict[str, str], states: list[State] | None, first: int) -> tuple[State, State]:
    """A run that starts from `states`: what it had after loading, and after two more steps."""
    wire = Wire(topology="flat", **fields)
    with Link(wire, Mesh({"shard": groups.world_size()}), "shard") as link:
        assert link.feedback is not None
        if states is not None:
            link.feedback.load_state_dict(states)
        loaded = link.feedback.state_dict()
        train(link, groups.rank(), 2, first)
        return loaded, link.feedback.state_dict()


def pending(states: list[State]) -> dict[str, torch.Tensor]:
    """The mean that is still to be sent, by name, in fp64: workers', and the server's part."""
    found = {
        f"{side} {name}": torch.zeros(n, dtype=torch.float64)
        for side in (WORKER, SERVER)
        for name, n in LENGTHS.items()
    }
    for state in states:
        for key, data in state.items():
            side, rest = key.split("/", 1)
            name, start = rest.rsplit("/", 1)
            where = found[f"{side.split(':')[0]} {name}"]
            where[int(start) : int(start) + data.numel()] += data.double()
    return {key: total / len(states) for key, total in found.items()}


@pytest.mark.parametrize(
    "fields",
    [
        {"codec": "int4", "feedback": "worker"},
        {"codec": "sign", "feedback": "both"},
    ],
    ids=["worker", "both"],
)
def test_four_ranks_then_two_then_three(ranks: RankPool, fields: dict[str, str]) -> None:
    four = [after for _, after in ranks(4, segment, fields, None, 0)]
    assert any(data.abs().max() > 0.01 for data in pending(four).values())
    states, first = four, 2
    for world in (2, 3):
        kept = pending(states)
        results = ranks(world, segment, fields, states, first)
        for loaded, _ in results:
            for key, data in loaded.items():
                side, rest = key.split("/", 1)
                name, start = rest.rsplit("/", 1)
                assert start == "0"
                side = side.split(":")[0]
                mean = kept[f"{side} {name}"]
                exact = mean if side == WORKER else mean * world
                assert torch.equal(data, exact.float())
        states, first = [after for _, after in results], first + 2
    assert {key.rsplit("/", 1)[0].split("/", 1)[1] for key in states[0]} == set(LENGTHS)


def unbroken(fields: dict[str, str]) -> tuple[State, torch.Tensor]:
    link = run(Wire(topology="flat", **fields), 2, 0)
    assert link.feedback is not None
    state = link.feedback.state_dict()
    flat = values(groups.rank(), NUMEL, torch.float32, seed=7)
    link.all_reduce(flat, key="bucket", spans=spans_of(["a.weight", "b/odd.bias"])).wait()
    link.close()
    return state, flat


def resumed(fields: dict[str, str], states: list[State]) -> torch.Tensor:
    with Link(Wire(topology="flat", **fields), Mesh({"shard": 2}), "shard") as link:
        assert link.feedback is not None
        link.feedback.load_state_dict(states)
        flat = values(groups.rank(), NUMEL, torch.float32, seed=7)
        link.all_reduce(flat, key="bucket", spans=spans_of(["a.weight", "b/odd.bias"])).wait()
    return flat


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_goes_on_bit_for_bit(ranks: RankPool, dtype: str) -> None:
    fields = {"codec": "int4", "feedback": "both", "feedback_dtype": dtype}
    whole = ranks(2, unbroken, fields)
    again = ranks(2, resumed, fields, [state for state, _ in whole])
    assert torch.equal(again[0], whole[0][1])
    assert torch.equal(again[1], whole[1][1])


def test_hosts_keep_the_mean_too() -> None:
    """Two hosts of two: a rank keeps its host's errors for its own chunks."""
    name, length = "w", 8
    states = []
    for rank in range(4):
        half = slice(0, 4) if rank % 2 == 0 else slice(4, 8)
        kept = Feedback(rank, 4, "fp32", CPU, share=2)
        span = (Span(name, half.start, half.stop, 0),)
        kept.error(WORKER, "k", 4, span).copy_(torch.arange(4.0) + 10 * rank)
        states.append(kept.state_dict())
    total = torch.zeros(8)
    for rank in range(4):
        total[4 * (rank % 2) : 4 * (rank % 2) + 4] += torch.arange(4.0) + 10 * rank
    flat = Feedback(0, 3, "fp32", CPU)
    flat.load_state_dict(states)
    assert torch.equal(flat.error(WORKER, "k", 8, (Span(name, 0, 8, 0),)), total / 4)
    hosts = Feedback(1, 6, "fp32", CPU, share=3)
    hosts.load_state_dict(states)
    assert torch.equal(
        hosts.error(WORKER, "k", 2, (Span(name, 2, 4, 0),)), (total.double() / 4 * 3).float()[2:4]
    )
    same = Feedback(1, 4, "fp32", CPU, share=2)
    same.load_state_dict(states)
    assert torch.equal(same.error(WORKER, "k", 4, (Span(name, 4, 8, 0),)), torch.arange(4.0) + 10)
    assert length == 8
