"""A Python or a kernel that lets no memory be shared: ranks of one host go through Gloo."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from lezero.comm import shared_memory
from lezero.comm.link import Link
from lezero.comm.mesh import Mesh
from lezero.comm.probe import probe
from lezero.comm.topology import find_hosts
from lezero.comm.wire import Wire
from lezero.core import groups
from lezero.core.errors import ConfigError, DistributedError
from lezero.ops import signal
from tests.ranks import RankPool


def refused(*_: object) -> int:
    raise OSError(errno.ENOSYS, "Function not implemented")


def take_away(patch: pytest.MonkeyPatch, name: str, *, by_kernel: bool) -> None:
    if by_kernel:
        patch.setattr(os, name, refused)
    else:
        patch.delattr(os, name, raising=False)


def without(name: str, by_kernel: bool, unable: list[int]) -> list[str]:
    """The topology of ranks of which `unable` have no `os.{name}`, and what a probe measures."""
    with pytest.MonkeyPatch.context() as patch:
        if groups.rank() in unable:
            take_away(patch, name, by_kernel=by_kernel)
        with Mesh({"shard": groups.world_size()}) as mesh:
            hosts = find_hosts(mesh.group("shard"))
            assert hosts.ranks == tuple((rank,) for rank in range(groups.world_size()))
            with Link(Wire(), mesh, "shard") as link:
                flat = torch.full((8,), float(groups.rank()))
                link.all_reduce(flat, key="x").wait()
                assert flat.eq(sum(range(groups.world_size()))).all()
                topology = link.topology
            with pytest.raises(ConfigError, match="topology: 'shared' needs all ranks to share"):
                Link(Wire(topology="shared"), mesh, "shard")
            told = [list(range(groups.world_size()))]  # by somebody who takes them for one host
            with pytest.raises(DistributedError, match="memfd_create and pidfd_open"):
                Link(Wire(topology="shared"), mesh, "shard", hosts=told)
            return [topology, *(level.name for level in probe(mesh, "shard").levels)]


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("name", ["memfd_create", "pidfd_open"])
@pytest.mark.parametrize("unable", [[0, 1], [1]])
def test_ranks_without_it_go_through_gloo(
    ranks: RankPool, name: str, by_kernel: bool, unable: list[int]
) -> None:
    assert ranks(2, without, name, by_kernel, unable) == [["flat", "network"]] * 2


@pytest.mark.skipif(not signal.available(), reason="no compiler, or not Linux")
def test_asking_leaves_nothing_open() -> None:
    before = os.listdir("/proc/self/fd")
    assert shared_memory.available() == all(hasattr(os, n) for n in ("memfd_create", "pidfd_open"))
    assert os.listdir("/proc/self/fd") == before
