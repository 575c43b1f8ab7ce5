"""Axes, lines and the mesh that DTensor sees."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from lezero.comm.mesh import Mesh
from lezero.core import groups
from lezero.core.errors import ConfigError
from tests.ranks import RankPool


def lines() -> None:
    rank = groups.rank()
    with Mesh({"replicate": 2, "shard": 2, "one": 1}) as mesh:
        assert mesh.lines("shard") == [[0, 1], [2, 3]]
        assert sorted(mesh.lines("replicate")) == [[0, 2], [1, 3]]
        assert mesh.ranks("shard") == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert (mesh.index("replicate"), mesh.index("shard")) == divmod(rank, 2)
        assert mesh.size("one") == 1
        line = mesh["shard"].device_mesh
        x = DTensor.from_local(torch.tensor([float(rank)]), line, [Shard(0)])
        assert x.full_tensor().tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert mesh.device_mesh.shape == (2, 2, 1)
        group = mesh.group("replicate")
        assert group is not None
        assert groups.gather_objects(rank, group) == [rank % 2, rank % 2 + 2]
    with Mesh({"shard": 4}) as mesh:
        assert mesh["shard"].device_mesh.size() == 4


def test_lines_of_a_mesh(ranks: RankPool) -> None:
    ranks(4, lines)


def refused(axes: dict[str, int]) -> str:
    with pytest.raises(ConfigError) as caught:
        Mesh(axes)
    return str(caught.value)


def test_a_mesh_that_does_not_divide_the_world_is_refused_on_every_rank(ranks: RankPool) -> None:
    texts = ranks(2, refused, {"replicate": 2, "shard": 2})
    assert texts[0] == texts[1]
    assert "(replicate: 2, shard: 2) hold 4 ranks, but there are 2" in texts[0]


def test_one_process_without_a_group() -> None:
    mesh = Mesh({"shard": 1})
    assert mesh.group("shard") is None
    with pytest.raises(ConfigError, match="no axis 'model'; it has shard"):
        mesh.size("model")
    for size in (0, 1.0, "1", None, True):
        with pytest.raises(ConfigError, match=r"axis 'shard' has .* whole number, 1 or more"):
            Mesh({"shard": size})  # type: ignore[dict-item]
    try:
        x = DTensor.from_local(torch.ones(3), mesh.device_mesh, [Shard(0)])
        assert x.full_tensor().sum() == 3
    finally:
        groups.leave()
