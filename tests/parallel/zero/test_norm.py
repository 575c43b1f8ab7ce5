"""The two ways to take sums of squares: by pieces on a processor, at once on an accelerator."""

from __future__ import annotations

import pytest
import torch

from lezero.core import groups
from lezero.core.errors import DistributedError
from lezero.parallel.zero import Zero, clip_grad_norm_, norm, shard_
from tests.parallel.zero.models import batches, loss_of, make
from tests.ranks import RankPool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_agree_in_fp64(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    some = [torch.randn(700, 1000).to(dtype), None, torch.randn(5).to(dtype), torch.empty(0, 3)]
    pieces, once = norm.squares(some, cpu), norm.at_once(some, cpu)
    assert once.dtype == pieces.dtype == torch.float64
    assert pieces[0] == pytest.approx(some[0].double().square().sum().item(), rel=1e-12)
    assert torch.allclose(pieces, once, rtol=1e-12, atol=0)
    assert once[1] == once[3] == 0
    assert norm.at_once([None, None], cpu).tolist() == [0, 0]


def clipped_alone(stage: int) -> None:
    model = shard_(make(), Zero(stage=stage))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, tokens in enumerate(batches(3, 2, groups.rank())):
        loss_of(model, tokens).backward()
        if step == 1 and groups.rank() == 0:
            clip_grad_norm_(model, 1.0)
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_rank_that_clips_alone_is_named(ranks: RankPool, stage: int) -> None:
    with pytest.raises(DistributedError, match=r"rank 0 entered all_gather of 'gradient norm'"):
        ranks(2, clipped_alone, stage, timeout_s=20)
