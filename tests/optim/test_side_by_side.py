"""A fused step however weights, gradients and moments lie in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lezero.core.errors import ConfigError
from lezero.optim import AdamW
from lezero.parallel.zero import Zero, full_state_dict, shard_
from tests.ranks import RankPool

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def conv() -> nn.Module:
    return nn.Conv2d(3, 4, 3)


def dense(model: nn.Module) -> list[Tensor]:
    return list(model.parameters())


def turned(model: nn.Module) -> list[Tensor]:
    """With the gradient of a transposed weight for each, as assigned gradients may lie."""
    for p in model.parameters():
        assert p.grad is not None
        order = tuple(range(p.dim()))[::-1]
        p.grad = p.grad.permute(order).contiguous().permute(order)
    return list(model.parameters())


def trained(
    make: Callable[..., torch.optim.Optimizer],
    model: nn.Module,
    before: Callable[[nn.Module, int], Any],
    steps: int = 6,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> list[Tensor]:
    optimizer = make(model.parameters(), lr=0.01, **options)
    torch.manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 5, 5).to(dtype)).float().square().mean().backward()
        before(model, step)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def plain(*args: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(*args, foreach=False, **options)


def compared(
    model: nn.Module, before: Callable[[nn.Module, int], Any], dtype: torch.dtype, **options: Any
) -> None:
    mine = trained(AdamW, copy.deepcopy(model), before, dtype=dtype, **options)
    theirs = trained(plain, copy.deepcopy(model), before, dtype=dtype, **options)
    for one, other in zip(mine, theirs, strict=True):
        tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_that_lie_otherwise(dtype: torch.dtype, amsgrad: bool) -> None:
    torch.manual_seed(0)
    model = conv().to(dtype)
    compared(model, lambda m, step: turned(m), dtype, amsgrad=amsgrad)
    optimizer = AdamW(model.parameters())
    model(torch.randn(2, 3, 5, 5).to(dtype)).sum().backward()
    grads = [p.grad for p in turned(model)]
    optimizer.step()
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_moments_of_another_layout(dtype: torch.dtype) -> None:
    """The model is turned in mid-run, or its state comes from one that lay otherwise."""

    def turn(model: nn.Module, step: int) -> None:
        if step == 3:
            model.to(memory_format=torch.channels_last)

    torch.manual_seed(0)
    compared(conv().to(dtype), turn, dtype)
    first, second = conv().to(dtype), conv().to(dtype, memory_format=torch.channels_last)
    second.load_state_dict(first.state_dict())
    optimizers = [AdamW(m.parameters(), lr=0.01) for m in (first, second)]
    given = torch.randn(2, 3, 5, 5).to(dtype)
    for number in range(4):
        if number == 2:
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            second.load_state_dict(first.state_dict())
        for model, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            model(given).float().square().mean().backward()
            optimizer.step()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_with_gaps_is_trained_and_what_lies_in_them_is_left(dtype: torch.dtype) -> None:
    def run(make: Callable[..., torch.optim.Optimizer]) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        whole = torch.randn(6, 8).to(dtype)
        weight, bias = nn.Parameter(whole[:, :5]), nn.Parameter(torch.zeros(6, dtype=dtype))
        optimizer = make([weight, bias], lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            F.linear(torch.ones(2, 5, dtype=dtype), weight, bias).float().square().mean().backward()
            optimizer.step()
        assert weight.data_ptr() == whole.data_ptr()
        assert weight.stride() == (8, 1)
        return whole[:, :5], whole[:, 5:], bias.detach()

    mine, theirs = run(AdamW), run(plain)
    torch.manual_seed(0)
    assert torch.equal(mine[1], torch.randn(6, 8).to(dtype)[:, 5:])
    for one, other in zip(mine, theirs, strict=True):
        tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_a_closure_may_lay_gradients_as_it_likes() -> None:
    def run(make: Callable[..., torch.optim.Optimizer]) -> list[Tensor]:
        torch.manual_seed(0)
        model = conv()
        optimizer = make(model.parameters(), lr=0.01)
        given = torch.randn(2, 3, 5, 5)

        def closure() -> float:
            optimizer.zero_grad()
            loss = model(given).square().mean()
            loss.backward()
            turned(model)
            return float(loss)

        losses = [optimizer.step(closure) for _ in range(4)]
        assert losses[-1] < losses[0]
        return list(model.parameters())

    for one, other in zip(run(AdamW), run(plain), strict=True):
        torch.testing.assert_close(one, other)


def test_a_scaler_leaves_gradients_unscaled_however_they_lie() -> None:
    left = []
    for turn in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(5, 6, bias=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = AdamW(model.parameters(), lr=0.01)
        scaler.scale(model(torch.ones(2, 5)).square().mean()).backward()
        if turn:
            turned(model)
        scaler.step(optimizer)
        left.append((model.weight.detach(), model.weight.grad))
    for one, other in zip(*left, strict=True):
        torch.testing.assert_close(one, other)


def test_expanded_gradients() -> None:
    """As `torch.autograd.grad` gives them of sums; all elements share one number."""
    weight, other = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    mine, theirs = AdamW([weight], lr=0.1), plain([other], lr=0.1)
    for _ in range(3):
        (weight.grad,) = torch.autograd.grad(weight.sum(), [weight])
        (other.grad,) = torch.autograd.grad(other.sum(), [other])
        assert weight.grad.stride() == (0, 0)
        mine.step()
        theirs.step()
        assert torch.equal(weight.grad, other.grad)
    torch.testing.assert_close(weight, other)


def test_what_fails_leaves_weights_and_gradients_where_they_were() -> None:
    whole = torch.randn(6, 8)
    weight = nn.Parameter(whole[:, :5])
    optimizer = AdamW([weight], lr=0.01)
    weight.grad = torch.randn(5, 6).t()
    grad, before = weight.grad, whole.clone()
    optimizer.param_groups[0]["betas"] = "none"
    with pytest.raises((TypeError, ValueError)):
        optimizer.step()
    assert weight.grad is grad
    assert weight.data_ptr() == whole.data_ptr()
    assert torch.equal(whole, before)


def of_shards(stage: int) -> float:
    """How far a sharded run, whose gradients are turned, is from a plain one."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model = shard_(copy.deepcopy(whole), Zero(stage=stage))
    mine, theirs = AdamW(model.parameters(), lr=0.01), plain(whole.parameters(), lr=0.01)
    for number in range(4):
        torch.manual_seed(number)
        given = torch.randn(4, 6, dtype=torch.float64)
        for net, optimizer in ((model, mine), (whole, theirs)):
            optimizer.zero_grad()
            net(given).square().mean().backward()
            for p in net.parameters():
                if hasattr(p.grad, "to_local") and p.dim() == 2:
                    held = p.grad.to_local().t().contiguous().t()
                    p.grad = DTensor.from_local(
                        held, p.device_mesh, p.placements, run_check=False, shape=p.shape,
                        stride=p.stride(),
                    )  # fmt: skip
            optimizer.step()
    found = full_state_dict(model)  # on rank 0
    return (
        max(float((found[n] - whole.get_parameter(n)).abs().max()) for n in found) if found else 0.0
    )


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_shards_whose_gradients_lie_otherwise(ranks: RankPool, stage: int) -> None:
    assert max(ranks(2, of_shards, stage)) < 1e-12


@pytest.mark.parametrize("rows", [2, 4, 4000])
def test_a_parameter_that_was_resized_in_place_is_refused(rows: int) -> None:
    """torch's kernels would read and write beyond its moments."""
    model = nn.Linear(3, 40)
    optimizer = AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    step()
    model.weight.data, model.bias.data = torch.ones(rows, 3), torch.ones(rows)
    with pytest.raises(ConfigError, match=rf"is \({rows}, 3\) and exp_avg \(40, 3\).*a new opti"):
        step()
    optimizer = AdamW(model.parameters())
    step()
