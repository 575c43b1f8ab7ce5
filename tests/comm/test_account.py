"""Bytes sent: counted, by the formula of the page, and by the kernel's counters."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from lezero.comm.account import OPERATIONS
from lezero.comm.link import Link
from lezero.comm.mesh import Mesh
from lezero.comm.wire import Wire
from lezero.core import groups
from tests.comm import network
from tests.ranks import RankPool

WIRES = (
    Wire(),
    Wire(topology="flat"),
    Wire(codec="int4", topology="flat"),
    Wire(codec="sign:128", feedback="both", gather="int8", topology="flat"),
    Wire(codec="topk:0.01", feedback="both", topology="flat"),
)


def call(link: Link, operation: str, numel: int, dtype: torch.dtype) -> None:
    whole, part = torch.ones(numel, dtype=dtype), torch.ones(numel // link.size, dtype=dtype)
    if operation == "reduce_scatter":
        link.reduce_scatter(whole, part, key="x").wait()
    elif operation == "all_gather":
        link.all_gather(part, whole, key="x").wait()
    else:
        link.all_reduce(whole, key="x").wait()


def exact(fields: list[dict[str, str]], hosts: list[list[int]] | None) -> int:
    world, count = groups.world_size(), 0
    for one in fields:
        with Link(Wire.parse(one), Mesh({"s": world}), "s", hosts=hosts) as link:
            for operation, n, dtype in product(
                OPERATIONS, (0, 1, 333), (torch.float32, torch.bfloat16)
            ):
                call(link, operation, n * world, dtype)
                formula = link.sent_bytes(operation, n * world, dtype)
                taken = link.account.take()
                assert taken == {o: formula if o == operation else 0 for o in OPERATIONS}
                assert link.account.take() == dict.fromkeys(OPERATIONS, 0)
                count += 1
            assert sum(link.account.total.values()) > 0 or link.topology == "shared"
    return count


@pytest.mark.parametrize("world", [2, 3])
def test_counted_bytes_equal_the_formula(ranks: RankPool, world: int) -> None:
    assert min(ranks(world, exact, [wire.to_dict() for wire in WIRES], None)) == 18 * len(WIRES)


def test_counted_bytes_equal_the_formula_between_hosts(ranks: RankPool) -> None:
    fields = [{"topology": "hierarchical", "codec": codec} for codec in ("none", "int4")]
    ranks(4, exact, fields, [[0, 1], [2, 3]])


def measure() -> list[list[list[int]]]:
    """For each operation on each wire, rounds of: bytes this rank counted, its host's cable saw."""
    found = []
    for axes, fields in (({"host": 2, "rank": 2}, {"codec": "int8"}), ({"host": 4}, {})):
        with Mesh(axes) as mesh, Link(Wire.parse(fields), mesh, "host") as link:
            assert link.topology == ("hierarchical" if axes["host"] == 4 else "flat")
            for operation in OPERATIONS:
                call(link, operation, 1 << 10, torch.float32)  # connections are made
                rounds = []
                for _ in range(3):
                    groups.barrier()
                    link.account.take()
                    before = network.bytes_out()
                    call(link, operation, 2 << 20, torch.float32)
                    groups.barrier()
                    rounds.append([sum(link.account.take().values()), network.bytes_out() - before])
                found.append(rounds)
    return found


@pytest.mark.skipif(bool(network.missing()), reason=network.missing())
def test_counted_bytes_are_those_on_the_cable() -> None:
    """Of three rounds the best: on a busy machine TCP sends some segments twice."""
    with network.two_hosts() as hosts:
        results = hosts.run(2, "tests.comm.test_account:measure")
    for first, second in (results[:2], results[2:]):
        for some, others in zip(first, second, strict=True):
            excess = []
            for (mine, cable), (theirs, again) in zip(some, others, strict=True):
                excess.append(max(cable, again) / (mine + theirs) - 1)
            print("on the cable beyond what was counted:", *(f"{one:+.2%}" for one in excess))
            assert -0.001 < min(excess) < 0.03
