"""The two ways to take sums of squares: by pieces on a processor, at once on an accelerator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lezero.core import groups
from lezero.core.errors import ConfigError, DistributedError
from lezero.parallel.zero import Zero, clip_grad_norm_, grad_norm, norm, shard_
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


NORMS = (1.0, 2.0, 3.0, math.inf)


def other_norms() -> None:
    (tokens,), (mine,) = batches(1), batches(1, 2, groups.rank())
    plain = make()
    loss_of(plain, tokens).backward()
    expected = {
        p: float(nn.utils.get_total_norm([x.grad for x in plain.parameters()], p)) for p in NORMS
    }
    nn.utils.clip_grad_norm_(plain.parameters(), 1e-3, norm_type=math.inf)
    seen = []
    for stage in (0, 1, 3):
        model = shard_(make(), Zero(stage=stage))
        loss_of(model, mine).backward()
        seen.append([float(grad_norm(model, p)) for p in NORMS])
        assert seen[-1] == seen[0]  # the same bits
        assert dict(zip(NORMS, seen[-1], strict=True)) == pytest.approx(expected, rel=1e-5)
        clip_grad_norm_(model, 1e-3, norm_type=math.inf)
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            gradient: Any = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            torch.testing.assert_close(whole, other.grad, rtol=1e-3, atol=1e-8)


def test_every_norm_is_as_torchs_and_the_same_at_all_stages(ranks: RankPool) -> None:
    ranks(2, other_norms)
    with pytest.raises(ConfigError, match=r"norm_type is 0.0; allowed is above 0, or inf"):
        grad_norm(nn.Linear(2, 2), 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_clips_nothing(bad: float) -> None:
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([5.0, bad, 7.0])
    assert not math.isfinite(float(clip_grad_norm_([weight], 1.0)))
    assert torch.equal(weight.grad.nan_to_num(), torch.tensor([5.0, bad, 7.0]).nan_to_num())


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


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_complex_gradients_count_by_their_magnitude(norm_type: float) -> None:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(5, 3, dtype=d)) for d in (torch.cfloat, torch.float32)]
    for one in made:
        one.grad = torch.randn_like(one)
    twins = [nn.Parameter(one.detach().clone()) for one in made]
    for one, twin in zip(made, twins, strict=True):
        twin.grad = one.grad.clone()  # type: ignore[union-attr]
    wanted = nn.utils.clip_grad_norm_(twins, 0.5, norm_type)
    assert float(clip_grad_norm_(made, 0.5, norm_type)) == pytest.approx(float(wanted), rel=1e-5)
    for one, twin in zip(made, twins, strict=True):
        torch.testing.assert_close(one.grad, twin.grad)
    grads = [one.grad.conj() for one in made]  # type: ignore[union-attr]
    both = [norm.squares(grads, torch.device("cpu")), norm.at_once(grads, torch.device("cpu"))]
    torch.testing.assert_close(*both)
