"""Routes that must be the same everywhere: on all lines of a mesh, said or chosen."""

from __future__ import annotations

import pytest
import torch

from lezero.comm.link import Link
from lezero.comm.mesh import Mesh
from lezero.comm.wire import Wire
from lezero.core import groups
from lezero.ops import signal
from tests.comm.test_link import values
from tests.ranks import RankPool


def lines_apart() -> str:
    """Ranks 0 and 1 share memory, 2 and 3 do not."""
    hosts = [[0, 1]] if groups.rank() < 2 else [[0], [1]]
    with Link(Wire(), Mesh({"lines": 2, "s": 2}), "s", hosts=hosts) as link:
        return link.topology


def test_all_lines_of_a_mesh_take_one_route(ranks: RankPool) -> None:
    assert ranks(4, lines_apart) == ["flat"] * 4


def summed_over_hosts(codec: str) -> list[float]:
    """A sum of bf16 over two hosts with int8, which the wire says or codec auto chooses."""
    wire = Wire(codec=codec, feedback="none" if codec == "auto" else "both")
    with Link(wire, Mesh({"s": 4}), "s", hosts=[[0, 1], [2, 3]]) as link:
        assert link.topology == "hierarchical"
        if link.chooser is not None:
            link.chooser._use("int8:256")
        out = torch.empty(1024)
        link.reduce_scatter(values(link.rank, 4096, torch.bfloat16), out, key="x").wait()
        return out.tolist()


@pytest.mark.skipif(not signal.available(), reason="no compiler, or not Linux")
def test_hosts_sum_in_fp32_before_a_codec_that_auto_chose_too(ranks: RankPool) -> None:
    assert ranks(4, summed_over_hosts, "auto") == ranks(4, summed_over_hosts, "int8")


def summed_along_a_line() -> torch.Tensor:
    """Eight ranks in two lines of two hosts each, whose ranks take turns."""
    with Link(Wire(), Mesh({"s": 4, "lines": 2}), "s", hosts=[[0, 1], [2, 3]]) as link:
        assert link.topology == "hierarchical"
        flat = values(groups.rank(), 64, torch.float32)
        link.all_reduce(flat, key="x").wait()
        return flat


@pytest.mark.skipif(not signal.available(), reason="no compiler, or not Linux")
def test_each_line_of_a_mesh_sums_over_its_own_hosts(ranks: RankPool) -> None:
    found = ranks(8, summed_along_a_line)
    for rank, total in enumerate(found):
        a, b, c, d = (values(other, 64, torch.float32) for other in range(rank % 2, 8, 2))
        assert torch.equal(total, (a + b) + (c + d))
