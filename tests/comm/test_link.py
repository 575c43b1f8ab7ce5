"""A link against a sum in one process, bit for bit."""

from __future__ import annotations

import contextlib
import time
from importlib import metadata

import pytest
import torch
import torch.distributed as dist

from lezero.comm.account import Account
from lezero.comm.buffers import Buffers
from lezero.comm.flat import Flat
from lezero.comm.link import Link
from lezero.comm.mesh import Mesh
from lezero.comm.watch import Watch
from lezero.comm.wire import Wire
from lezero.core import groups, sockets
from lezero.core.errors import ConfigError, DistributedError, OrderError
from lezero.ops import signal
from lezero.profiler.memory import rss
from tests.ranks import RankPool

SIZES = (0, 1, 17, 1000, 4099)
TYPES = (torch.float32, torch.bfloat16)


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator).mul(1 + rank).to(dtype)


def summed(world: int, numel: int, dtype: torch.dtype, out: torch.dtype) -> torch.Tensor:
    total = values(0, numel, dtype).float()
    for rank in range(1, world):
        total += values(rank, numel, dtype).float()
    return total.to(out)


def collectives(topology: str) -> None:
    rank, world = groups.rank(), groups.world_size()
    with Mesh({"shard": world}) as mesh, Link(Wire(topology=topology), mesh, "shard") as link:
        for n in SIZES:
            for dtype in TYPES:
                flat = link.buffer(world * n, dtype)
                flat.copy_(values(rank, world * n, dtype))
                for kind in TYPES:
                    out = torch.full((n,), torch.nan, dtype=kind)
                    link.reduce_scatter(flat, out, key="a").wait()
                    expected = summed(world, world * n, dtype, kind)
                    assert torch.equal(out, expected[rank * n : rank * n + n])
                assert torch.equal(flat, values(rank, world * n, dtype))
                whole = torch.full((world * n,), torch.nan, dtype=dtype)
                link.all_gather(values(rank, n, dtype), whole, key="b").wait()
                assert torch.equal(whole, torch.cat([values(r, n, dtype) for r in range(world)]))
                link.all_reduce(flat, key="c").wait()
                assert torch.equal(flat, summed(world, world * n, dtype, dtype))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("topology", ["flat", "shared"])
def test_the_same_bits_as_a_sum_in_rank_order(ranks: RankPool, world: int, topology: str) -> None:
    ranks(world, collectives, topology)


def many_in_flight(topology: str, hosts: list[list[int]] | None) -> None:
    """Launched in one order, waited for in another, with a different pace on each rank."""
    rank, world = groups.rank(), groups.world_size()
    wire = Wire(topology=topology)
    with Mesh({"shard": world}) as mesh, Link(wire, mesh, "shard", hosts=hosts) as link:
        for _ in range(3):
            flats = [values(rank, world * 100, torch.float32, seed=i) for i in range(20)]
            outs = [torch.empty(100) for _ in flats]
            wholes = [torch.empty(world * 100) for _ in flats]
            pending = []
            for i, flat in enumerate(flats):
                pending.append(link.reduce_scatter(flat, outs[i], key=f"r{i}"))
                pending.append(link.all_gather(flat[:100].clone(), wholes[i], key=f"g{i}"))
                pending.append(link.all_reduce(flat.clone() if i % 3 else flat, key=f"a{i}"))
                if i % (rank + 2) == 0:
                    pending[-1 - rank % 3].poll()
            for one in pending[:: -1 if rank else 1]:
                one.wait()
            for i, out in enumerate(outs):
                mine = [values(r, world * 100, torch.float32, seed=i) for r in range(world)]
                sums = [sum(mine[r] for r in host) for host in hosts or [list(range(world))]]
                total = sum(sums)
                assert torch.equal(out, total[rank * 100 : rank * 100 + 100])
                assert torch.equal(wholes[i], torch.cat([one[:100] for one in mine]))
                if i % 3 == 0:
                    assert torch.equal(flats[i], total)


@pytest.mark.parametrize("topology", ["flat", "shared"])
def test_many_in_flight_at_different_paces(ranks: RankPool, topology: str) -> None:
    ranks(3, many_in_flight, topology, None)


@pytest.mark.skipif(not signal.available(), reason="no compiler, or not Linux")
def test_many_in_flight_between_hosts(ranks: RankPool) -> None:
    ranks(4, many_in_flight, "hierarchical", [[0, 1], [2, 3]])


def changed_meanwhile(topology: str, hosts: list[list[int]] | None) -> None:
    """A shard that lies in `out` is written while it is on its way."""
    rank, world, n = groups.rank(), groups.world_size(), 50_000
    wire = Wire(topology=topology)
    with Mesh({"shard": world}) as mesh, Link(wire, mesh, "shard", hosts=hosts) as link:
        for make in (link.buffer, lambda numel, dtype: torch.zeros(numel, dtype=dtype)):
            wholes = [make(world * n, torch.float32) for _ in range(8)]
            owns = [whole[rank * n : rank * n + n].fill_(rank) for whole in wholes]
            pending = [
                link.all_gather(own, whole, key=str(i))
                for i, (own, whole) in enumerate(zip(owns, wholes, strict=True))
            ]
            for own in owns:
                own.fill_(100 + rank)
            for one in pending:
                one.wait()
            for whole in wholes:
                for r, part in enumerate(whole.view(world, n)):
                    as_it_was = (part == r) & (r != rank)
                    assert bool(((part == 100 + r) | as_it_was).all())


@pytest.mark.parametrize("topology", ["flat", "shared"])
def test_a_shard_that_changes_on_its_way_keeps_its_values(ranks: RankPool, topology: str) -> None:
    ranks(2, changed_meanwhile, topology, None)


@pytest.mark.skipif(not signal.available(), reason="no compiler, or not Linux")
def test_a_shard_that_changes_between_hosts_keeps_its_values(ranks: RankPool) -> None:
    ranks(4, changed_meanwhile, "hierarchical", [[0, 1], [2, 3]])


def watched(topology: str) -> str:
    """A rank that fails is named to who waits for it, with what it failed of."""
    with contextlib.suppress(ValueError), Watch.start(), Mesh({"shard": 2}) as mesh:
        link = Link(Wire(topology=topology), mesh, "shard", timeout_s=30)
        x = link.buffer(1000, torch.float32)
        for _ in range(3):
            link.all_reduce(x, key="layer 1").wait()
        if groups.rank() == 1:
            raise ValueError("no such file: batch 17")
        began = time.monotonic()
        with pytest.raises(DistributedError) as caught:
            link.all_reduce(x, key="layer 2").wait()
        assert time.monotonic() - began < 5
        return str(caught.value)
    time.sleep(3)
    return ""


@pytest.mark.parametrize("topology", ["flat", "shared"])
def test_the_watch_names_who_failed(ranks: RankPool, topology: str) -> None:
    text = ranks(2, watched, topology)[0]
    assert "rank 1" in text
    assert "no such file: batch 17" in text


def lost_meanwhile(operation: str, ask: str) -> str:
    """The connection goes while this rank computes, which then finds its collective ended."""
    wire = Wire(topology="flat", gather="int8")
    link = Link(wire, Mesh({"shard": 2}), "shard", timeout_s=20)
    flat, out = torch.ones(2000), torch.full((1000,), torch.nan)
    link.all_reduce(flat, key="healthy").wait()
    groups.barrier()
    if groups.rank() == 1:
        time.sleep(2)
        return ""
    if operation == "reduce_scatter":
        pending = link.reduce_scatter(flat, out, key="layer 3")
    else:
        pending = link.all_gather(out, flat, key="layer 3")
    sockets.shut()
    while not pending.ready():
        time.sleep(0.01)
    with pytest.raises(DistributedError) as caught:
        getattr(pending, ask)()
    assert not pending.finished
    with pytest.raises(DistributedError, match="failed before"):
        link.all_reduce(flat, key="next")
    return str(caught.value)


@pytest.mark.parametrize("ask", ["wait", "poll"])
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def test_what_ended_with_an_error_is_not_done(ranks: RankPool, operation: str, ask: str) -> None:
    text = ranks(2, lost_meanwhile, operation, ask)[0]
    assert text.startswith(f"{operation} 'layer 3': ")
    assert "lost contact with another rank" in text


def closed_meanwhile() -> None:
    with Mesh({"shard": 2}) as mesh, Link(Wire(topology="flat"), mesh, "shard") as link:
        pending = link.all_reduce(torch.ones(4), key="x")  # its steps are taken in `wait`
        dist.barrier()  # nobody leaves while another one begins
    for ask in (pending.wait, pending.poll):
        with pytest.raises(OrderError, match="all_reduce 'x': its link was closed before"):
            ask()


def test_a_wait_after_closing_is_told(ranks: RankPool) -> None:
    ranks(2, closed_meanwhile)


def differently(mesh: list[tuple[str, int]], hosts: list[list[int]] | None) -> str:
    """Rank 1 is given the axes the other way round, or other hosts."""
    odd = groups.rank() == 1
    with (
        Mesh(dict(mesh[::-1] if odd and hosts is None else mesh)) as made,
        pytest.raises(DistributedError) as caught,
    ):
        Link(Wire(), made, "a", hosts=hosts if odd else None)
    return str(caught.value)


def test_ranks_that_differ_are_told_what(ranks: RankPool) -> None:
    for text in ranks(4, differently, [("a", 2), ("b", 2)], None):
        assert "mesh is 'a: 2, b: 2' on rank" in text or "and 'a: 2, b: 2' on rank" in text
        assert "'b: 2, a: 2' on rank 1" in text
    for text in ranks(4, differently, [("b", 2), ("a", 2)], [[0, 1]]):
        assert "hosts is [[0, 1]] on rank 1 and None on rank 0; start every rank" in text


def test_one_rank_copies() -> None:
    link = Link(Wire(), Mesh({"shard": 1}), "shard")
    x, out = values(0, 7, torch.float32), torch.empty(7)
    link.reduce_scatter(x, out, key="a").wait()
    assert torch.equal(out, x)
    link.all_gather(x, out.zero_(), key="a").wait()
    assert torch.equal(out, x)
    assert link.all_reduce(x, key="a").poll()
    link.close()


def test_arguments_that_do_not_fit_are_told() -> None:
    with Link(Wire(), Mesh({"shard": 1}), "shard") as link:
        x = torch.zeros(6)
        with pytest.raises(ConfigError, match=r"'w': flat has 6 elements and out 5.*pad"):
            link.reduce_scatter(x, torch.zeros(5), key="w")
        with pytest.raises(ConfigError, match=r"int64; allowed is float32, bfloat16"):
            link.all_reduce(torch.zeros(3, dtype=torch.int64), key="w")
        with pytest.raises(ConfigError, match="flat, contiguous"):
            link.all_reduce(x[::2], key="w")
        with pytest.raises(ConfigError, match="one type for both"):
            link.all_gather(x, x.bfloat16(), key="w")


def double_over_int8() -> str:
    x = torch.zeros(8, dtype=torch.float64)
    with (
        Mesh({"a": 2}) as mesh,
        Link(Wire(codec="int8"), mesh, "a") as link,
        pytest.raises(ConfigError, match=r"float64, which no codec carries.*wire\.codec='none'"),
    ):
        link.all_reduce(x, key="x")
    return "refused"


def test_no_codec_carries_fp64(ranks: RankPool) -> None:
    assert ranks(2, double_over_int8) == ["refused"] * 2


def test_a_link_needs_no_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", missing)  # run from a checkout
    with Mesh({"shard": 1}) as mesh, Link(Wire(), mesh, "shard") as link:
        assert link.size == 1


def buffers() -> list[int]:
    with Link(Wire(topology="flat"), Mesh({"shard": 2}), "shard") as link:
        before = rss()
        flat = link.buffer(64 << 18, torch.float32)
        taken = rss() - before
        assert not flat[:: 1 << 16].any()
        flat[:100] = 1.0
        link.all_reduce(flat[:100], key="x").wait()
        assert flat[:101].tolist() == [2.0] * 100 + [0.0]
        assert link.buffer(0, torch.bfloat16).numel() == 0
        lanes = (groups.make([[0, 1]]), groups.make([[0, 1]]))
        elsewhere = Flat(lanes, Buffers(torch.device("meta")), Account())  # type: ignore[arg-type]
        assert elsewhere.buffer(8, torch.float32).is_meta
    return [taken]


def test_a_flat_buffer_takes_memory_where_it_is_touched(ranks: RankPool) -> None:
    assert max(ranks(2, buffers))[0] < 16 << 20


def blocked_elsewhere() -> float:
    rank, whole = groups.rank(), torch.empty(8)
    with (
        Mesh({"shard": 2}) as mesh,
        Link(Wire(topology="shared"), mesh, "shard", timeout_s=5) as link,
    ):
        if rank == 0:
            groups.barrier()
        pending = link.all_gather(torch.full((4,), float(rank)), whole, key="a")
        if rank == 0:
            pending.wait()  # rank 1 has launched it, and blocks in the sum below
        else:
            groups.barrier()
        groups.all_reduce_sum(torch.ones(1))
        pending.wait()
        groups.barrier()
    return float(whole.sum())


def test_what_is_in_flight_goes_on_while_its_rank_blocks_elsewhere(ranks: RankPool) -> None:
    assert ranks(2, blocked_elsewhere, timeout_s=20) == [4.0, 4.0]
