"""Shared memory between ranks: what moves, what is left behind, and a rank that dies or hangs."""

from __future__ import annotations

import os
import resource
import signal as signals
import time
from pathlib import Path

import pytest
import torch

from lezero.comm.link import Link
from lezero.comm.mesh import Mesh
from lezero.comm.topology import find_hosts
from lezero.comm.watch import Watch
from lezero.comm.wire import Wire
from lezero.core import groups
from lezero.core.errors import DistributedError
from lezero.ops import signal
from tests.ranks import RankPool

pytestmark = pytest.mark.skipif(not signal.available(), reason="no compiler, or not Linux")
SHARED = Wire(topology="shared")


def link_of_all(timeout_s: float = 20.0) -> Link:
    return Link(SHARED, Mesh({"shard": groups.world_size()}), "shard", timeout_s=timeout_s)


def views_and_staging() -> None:
    """Parts of a buffer, tensors of our own and a shard that lies in its place."""
    rank, world = groups.rank(), groups.world_size()
    with link_of_all() as link:
        memory = link.buffer(1000, torch.float32)
        flat = memory[100 : 100 + world * 7]
        flat.copy_(torch.arange(world * 7) + rank)
        total = world * torch.arange(world * 7) + sum(range(world))
        own = flat.view(world, 7)[rank]
        link.reduce_scatter(flat, own, key="in place").wait()
        assert torch.equal(own, total.view(world, 7)[rank].float())
        link.all_gather(own, flat, key="in place").wait()
        assert torch.equal(flat, total.float())
        assert memory[:100].eq(0).all()
        assert memory[100 + world * 7 :].eq(0).all()
        for _ in range(3):
            mine = torch.full((world * 7,), float(rank))
            link.all_reduce(mine, key="own").wait()
            assert mine.eq(sum(range(world))).all()


def test_views_and_tensors_outside_the_memory(ranks: RankPool) -> None:
    ranks(3, views_and_staging)


def files_open() -> tuple[int, int]:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:lezero")

    torch.zeros(1)
    before = count()
    with Mesh({"shard": groups.world_size()}) as mesh:
        link = Link(SHARED, mesh, "shard")
        link.all_reduce(link.buffer(64, torch.float32), key="a").wait()
        kept = mapped()
        groups.barrier()
        link.close()
    del link
    assert kept >= 3
    groups.leave()
    return count() - before, mapped()


def test_nothing_stays_open_or_mapped(ranks: RankPool) -> None:
    for opened, mapped in ranks(2, files_open):
        assert opened <= 0
        assert mapped == 0


def one_dies(how: str) -> tuple[str, float]:
    rank = groups.rank()
    link = link_of_all(timeout_s=1.5)
    flat = link.buffer(8, torch.float32)
    link.all_reduce(flat, key="healthy").wait()
    groups.barrier()
    if rank == 1:
        if how == "exit":
            os._exit(0)
        if how == "kill":
            os.kill(os.getpid(), signals.SIGKILL)
        time.sleep(4)
        return "", 0.0
    began = time.monotonic()
    with pytest.raises(DistributedError) as caught:
        link.all_reduce(flat, key="layer 3").wait()
    waited = time.monotonic() - began
    with pytest.raises(DistributedError, match="failed before"):
        link.all_reduce(flat, key="next")
    return str(caught.value), waited


def test_a_rank_that_hangs_is_named(ranks: RankPool) -> None:
    text, waited = ranks(2, one_dies, "hang")[0]
    assert "all_reduce 'layer 3': rank 1 lives, but has not come" in text
    assert 1.4 < waited < 3


def report_death(how: str, path: str) -> None:
    text, waited = one_dies(how)
    Path(path).write_text(f"{waited:.2f} {text}")


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_rank_that_died_is_named_at_once(ranks: RankPool, how: str, tmp_path: Path) -> None:
    path = tmp_path / "report"
    with pytest.raises(AssertionError):
        ranks(2, report_death, how, str(path))
    waited, text = path.read_text().split(" ", 1)
    assert "rank 1 died or left" in text
    assert "layer 3" in text
    assert float(waited) < 1


def many_descriptors() -> tuple[bool, list[float]]:
    """The watch and a link of a process that holds more descriptors than `select` can tell."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    watch = Watch.start()
    assert watch is not None
    with link_of_all() as link:
        flat = torch.ones(4)
        link.all_reduce(flat, key="a").wait()
        if groups.rank() == 1:
            time.sleep(0.5)  # so that the other looks whether this process has ended
        link.all_reduce(flat, key="b").wait()
    assert watch._told is None
    watched = watch._thread.is_alive() and watch._judge.peers[1 - groups.rank()].known
    for one in held:
        os.close(one)
    return watched, flat.tolist()


def test_more_descriptors_than_select_takes(ranks: RankPool) -> None:
    assert ranks(2, many_descriptors) == [(True, [4.0] * 4)] * 2


def other_call() -> str:
    rank = groups.rank()
    link = link_of_all()
    with pytest.raises(DistributedError) as caught:
        link.all_reduce(torch.zeros(4 if rank else 6), key="w" if rank else "v").wait()
    return str(caught.value)


def test_ranks_that_call_different_things_are_told(ranks: RankPool) -> None:
    first, second = ranks(2, other_call)
    for text in (first, second):
        assert "all_reduce 'v' of 6 float32" in text
        assert "all_reduce 'w' of 4 float32" in text


def hosts() -> tuple[tuple[int, ...], ...]:
    group = groups.make([list(range(groups.world_size()))])
    assert group is not None
    return find_hosts(group).ranks


def test_ranks_of_one_machine_share_a_host(ranks: RankPool) -> None:
    assert ranks(3, hosts) == [((0, 1, 2),)] * 3


def both_axes() -> None:
    rank = groups.rank()
    with (
        Mesh({"replicate": 2, "shard": 2}) as mesh,
        Link(Wire(), mesh, "shard") as inner,
        Link(Wire(), mesh, "replicate") as outer,
    ):
        assert inner.topology == outer.topology == "shared"
        x = torch.full((4,), 10.0**rank)
        out = torch.empty(2)
        inner.reduce_scatter(x, out, key="g").wait()
        outer.all_reduce(out, key="g").wait()
        assert out.tolist() == [1111.0, 1111.0]
        line = torch.empty(2)
        outer.all_gather(torch.tensor([float(rank)]), line, key="p").wait()
        assert line.tolist() == [rank % 2, rank % 2 + 2]


def test_links_on_both_axes_of_a_mesh(ranks: RankPool) -> None:
    ranks(4, both_axes)
