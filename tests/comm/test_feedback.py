"""Kept errors by name and offset: other buffers, other numbers of ranks, other storage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lezero.comm.dither import Dither
from lezero.comm.feedback import SERVER, WORKER, Feedback
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


@pytest.fixture(params=[torch.float32, torch.float64, torch.bfloat16], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[None]:
    """The type of which the process makes tensors where none is named."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_other_buffers_find_the_same_errors(dtype: str) -> None:
    kept = Feedback(0, 2, dtype, CPU)
    spans = spans_of(["a.weight", "b/odd.bias"])
    error = kept.error(WORKER, "bucket", NUMEL, spans)
    error.copy_(torch.randn(NUMEL, dtype=torch.float32).to(error.dtype))
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
    assert len(kept.state_dict()) == 2
    again = Feedback(0, 2, dtype, CPU)
    again.load_state_dict([kept.state_dict(), {}])
    for name in LENGTHS:
        found = again.error(WORKER, name, LENGTHS[name], (Span(name, 0, LENGTHS[name], 0),))
        assert torch.allclose(found.float(), parts[name], atol=0.1 if dtype == "int8" else 0)
    assert kept.fresh(WORKER, "own a.weight")
    assert not kept.fresh(WORKER, "own a.weight")


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("place", ["cpu", "table apart"])
def test_noise_is_of_fp32(place: str) -> None:
    dither = Dither(64, 0, CPU)
    if place != "cpu":
        dither._table = None  # as on an accelerator
    noise = dither._noise(torch.empty(32, 64, dtype=torch.float32))
    assert noise.dtype == torch.float32
    assert len(noise.unique()) > 2000


def test_packed_errors_are_decoded_into_one_buffer() -> None:
    kept, places = Feedback(0, 2, "int8", CPU), set()
    for length in (300, 200, 100):
        error = kept.error(WORKER, f"k{length}", length, (Span(f"k{length}", 0, length, 0),))
        assert len(error) == length
        places.add(error.data_ptr())
    assert len(places) == 1


def inputs(rank: int, step: int) -> torch.Tensor:
    flat = values(rank, NUMEL, torch.float32, seed=step)
    flat[157:] = 0
    return flat


def run(world_wire: Wire, steps: int, first: int) -> Link:
    link = Link(world_wire, Mesh({"shard": groups.world_size()}), "shard")
    train(link, steps, first)
    return link


def train(link: Link, steps: int, first: int) -> torch.Tensor:
    """The sum over the steps of what has arrived here, as a mean over the ranks."""
    spans, arrived = spans_of(["a.weight", "b/odd.bias"]), torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(first, first + steps):
        flat = inputs(link.rank, step)
        if link.wire.feedback == "both":
            link.all_reduce(flat, key="bucket", spans=spans).wait()
            arrived += flat
        else:
            out = torch.empty(NUMEL // link.size)
            link.reduce_scatter(flat, out, key="bucket", spans=spans).wait()
            arrived.view(link.size, -1)[link.rank] += out
    return arrived / link.size


State = dict[str, torch.Tensor]


def segment(
    fields: dict[str, str], states: list[State] | None, first: int
) -> tuple[State, State, torch.Tensor]:
    """A run that starts from `states`: what it had after loading and after two more steps, and what
    arrived in these."""
    wire = Wire(topology="flat", **fields)
    with Link(wire, Mesh({"shard": groups.world_size()}), "shard") as link:
        assert link.feedback is not None
        if states is not None:
            link.feedback.load_state_dict(states)
        loaded = link.feedback.state_dict()
        arrived = train(link, 2, first)
        return loaded, link.feedback.state_dict(), arrived


def split(key: str) -> tuple[str, str, int]:
    """Side, name and start of a piece of a state."""
    side, rest = key.split("/", 1)
    name, start = rest.rsplit("/", 1)
    return side.split(":")[0], name, int(start)


def spare(states: list[State]) -> list[bool]:
    """Of each piece, whether no buffer has asked for it."""
    return [key.split("/")[0].endswith(":spare") for state in states for key in state]


def pending(states: list[State], lengths: dict[str, int] = LENGTHS) -> dict[str, torch.Tensor]:
    """The mean that is still to be sent, by name, in fp64: workers', and the server's part. What is
    spare is not counted."""
    found = {
        f"{side} {name}": torch.zeros(n, dtype=torch.float64)
        for side in (WORKER, SERVER)
        for name, n in lengths.items()
    }
    for state in states:
        for key, data in state.items():
            side, name, start = split(key)
            if not any(spare([{key: data}])):
                found[f"{side} {name}"][start : start + data.numel()] += data.double()
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
    states: list[State] | None = None
    missing = torch.zeros(NUMEL, dtype=torch.float64)
    for first, world in ((0, 4), (2, 2), (4, 3)):
        kept = {} if states is None else pending(states)
        results = ranks(world, segment, fields, states, first)
        assert all(spare([loaded for loaded, _, _ in results]))
        for loaded, _, _ in results:
            for key, data in loaded.items():
                side, name, start = split(key)
                assert start == 0
                mean = kept[f"{side} {name}"]
                exact = mean if side == WORKER else mean * world
                assert torch.equal(data, exact.float())
        states = [after for _, after, _ in results]
        assert not any(spare(states))
        assert any(data.abs().max() > 0.01 for data in pending(states).values())
        for step in (first, first + 1):
            missing += sum(inputs(rank, step).double() for rank in range(world)) / world
        every = [arrived for *_, arrived in results]
        missing -= every[0] if fields["feedback"] == "both" else sum(every)
        owed = pending(states)
        for name, value in by_name(missing, spans_of(list(LENGTHS))).items():
            found = owed[f"{WORKER} {name}"] + owed[f"{SERVER} {name}"]
            assert torch.allclose(found, value, atol=1e-4)
    assert states is not None
    assert {split(key)[1] for key in states[0]} == set(LENGTHS)


def claim(size: int, share: int, states: list[State] | None) -> list[State]:
    """The states of `size` ranks on hosts of `share`, once each has asked for what it owns."""
    found, length = [], 12 // size
    for rank in range(size):
        kept = Feedback(rank, size, "fp32", CPU, share)
        if states is not None:
            kept.load_state_dict(states)
        chunks = [Span("w", r * length, (r + 1) * length, 0) for r in range(size)]
        mine = chunks[rank % share :: share]  # of the partners on the other hosts, and its own
        sent = tuple(span._replace(at=length * i) for i, span in enumerate(mine))
        errors = [
            kept.error(WORKER, "k", length * len(sent), sent),
            kept.error(SERVER, "k", length, (chunks[rank],)),
        ]
        if states is None:
            for error in errors:
                error.copy_(torch.randn(len(error), generator=torch.Generator().manual_seed(rank)))
        found.append(kept.state_dict())
    return found


def test_what_another_rank_has_claimed_is_not_counted_again() -> None:
    states = claim(4, 2, None)
    first = pending(states, {"w": 12})
    for size, share in ((6, 3), (3, 1), (4, 2), (2, 2), (2, 1), (4, 1)):
        states = claim(size, share, states)
        for key, value in pending(states, {"w": 12}).items():
            assert torch.allclose(value, first[key], atol=1e-6), (size, share, key)
        if share == 1:
            assert not any(spare(states))


def test_a_change_of_ranks_without_a_step_loses_nothing() -> None:
    states = claim(4, 2, None)
    first = pending(states, {"w": 12})
    for size, share in ((2, 1), (6, 3), (6, 3)):  # saved as soon as it was loaded
        loaded = []
        for rank in range(size):
            kept = Feedback(rank, size, "fp32", CPU, share)
            kept.load_state_dict(states)
            loaded.append(kept.state_dict())
        states = loaded
        assert all(spare(states))
    for key, value in pending(claim(3, 1, states), {"w": 12}).items():
        assert torch.allclose(value, first[key], atol=1e-6)


def unbroken(fields: dict[str, str]) -> tuple[State, torch.Tensor]:
    link = run(Wire(topology="flat", **fields), 2, 0)
    assert link.feedback is not None
    state = {key: data.clone() for key, data in link.feedback.state_dict().items()}
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
@pytest.mark.parametrize("codec", ["int4", "sign"])
def test_a_resumed_run_goes_on_bit_for_bit(ranks: RankPool, codec: str, dtype: str) -> None:
    """Though nothing is kept of padding, whose error would count in the scale of `sign`."""
    fields = {"codec": codec, "feedback": "both", "feedback_dtype": dtype}
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


def test_what_a_neighbour_of_the_host_sends_is_owed_by_it_alone() -> None:
    saved = Feedback(0, 1, "fp32", CPU)
    saved.error(WORKER, "k", 8, (Span("w", 0, 8, 0),)).fill_(1.0)
    kept = Feedback(0, 4, "fp32", CPU, share=2)
    kept.load_state_dict([saved.state_dict()])
    mine = kept.error(WORKER, "k", 4, (Span("w", 0, 4, 0),))
    assert mine.tolist() == [2.0] * 4  # of the sum of two ranks
    kept.leave((Span("w", 0, 8, 0),))  # the neighbour sends elements 4 to 8
    assert kept.error(WORKER, "other", 4, (Span("w", 4, 8, 0),)).tolist() == [0.0] * 4
    assert not any(spare([kept.state_dict()]))


def test_what_is_owed_is_paid_once() -> None:
    kept, spans = Feedback(0, 1, "fp32", CPU), (Span("w", 0, 4, 0),)
    kept.error(WORKER, "k", 4, spans).fill_(2.0)
    for paid in (3.0, 1.0):  # a step of two backwards has two sums
        flat = torch.ones(4)
        kept.pay("k", flat, spans)
        assert flat.tolist() == [paid] * 4


def paid(
    states: list[State], hosts: list[list[int]], feedback: str, operation: str
) -> tuple[torch.Tensor, State]:
    """What a sum of zeros brings after loading `states`, by parameter in other buffers, twice."""
    wire = Wire(codec="int4", feedback=feedback)
    with Link(wire, Mesh({"shard": groups.world_size()}), "shard", hosts=hosts) as link:
        assert link.topology == ("hierarchical" if len(hosts[0]) > 1 else "flat")
        assert link.feedback is not None
        link.feedback.load_state_dict(states)
        arrived = torch.zeros(NUMEL)
        for _ in range(2):
            flat = torch.zeros(NUMEL)
            spans = spans_of(["b/odd.bias", "a.weight"])
            if operation == "all_reduce":
                link.all_reduce(flat, key="other", spans=spans).wait()
                arrived += flat
            else:
                out = torch.empty(NUMEL // link.size)
                link.reduce_scatter(flat, out, key="other", spans=spans).wait()
                arrived.view(link.size, -1)[link.rank] += out
        return arrived, link.feedback.state_dict()


@pytest.mark.parametrize("hosts", [[[0], [1]], [[0], [1], [2]], [[0, 1], [2, 3]]], ids=str)
@pytest.mark.parametrize(
    ("feedback", "operation"),
    [("both", "reduce_scatter"), ("worker", "reduce_scatter"), ("worker", "all_reduce")],
)
def test_the_servers_error_is_paid_where_nothing_is_encoded_twice(
    ranks: RankPool, hosts: list[list[int]], feedback: str, operation: str
) -> None:
    fields = {"codec": "int4", "feedback": "both"}
    states = [state for _, state, _ in ranks(2, segment, fields, None, 0)]
    owed, world = pending(states), sum(map(len, hosts))
    results = ranks(world, paid, states, hosts, feedback, operation)
    left = [state for _, state in results]
    assert not any(split(key)[0] == SERVER for state in left for key in state)
    every = [arrived for arrived, _ in results]
    came = (every[0] if operation == "all_reduce" else sum(every)) / world
    after = pending(left)
    for name, value in by_name(came, spans_of(["b/odd.bias", "a.weight"])).items():
        mean = value + after[f"{WORKER} {name}"]
        wanted = owed[f"{WORKER} {name}"] + owed[f"{SERVER} {name}"]
        if operation == "reduce_scatter":  # encodes nothing of the sum
            assert torch.allclose(mean, wanted, atol=1e-5), name
            assert owed[f"{SERVER} {name}"].abs().max() > 0.01
