"""What the caller of a forecast holds stays as it was; what cannot be forecast is told by stage."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import nn

from lezero.core.errors import ConfigError
from lezero.parallel.zero import Zero
from lezero.plan.spec import StepSpec
from lezero.plan.trace import trace_step


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("seen", torch.ones(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.table(tokens))
        self.last = hidden.detach()
        self.mean = 0.9 * self.mean + 0.1 * self.last.mean((0, 1))
        self.seen.mul_(0.5)
        return self.head(hidden)


def spec(**changes: Any) -> StepSpec:
    return StepSpec(**{"batch": 4, "tokens": 8, **changes})


def optimizers() -> list[Callable[[nn.Module], torch.optim.Optimizer]]:
    kinds = [torch.optim.AdamW, torch.optim.Adagrad]
    made = [lambda model, kind=kind: kind(model.parameters(), foreach=False) for kind in kinds]
    return [*made, lambda model: torch.optim.AdamW(model.parameters(), fused=True)]


@pytest.mark.parametrize("make", optimizers())
def test_a_model_and_an_optimizer_that_are_held_stay_as_they_were(make) -> None:
    model = Small()
    optimizer = make(model)
    step = spec()
    step.mean_loss(model, step.make_batch()).backward()
    optimizer.step()
    del model.last
    model.eval()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = [p.grad for p in model.parameters()]
    held = trace_step(lambda: model, spec(optimizer=lambda _: optimizer))
    assert not model.training
    assert "last" not in vars(model)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    fresh = trace_step(Small, spec(optimizer=make))
    assert held.state_bytes == fresh.state_bytes
    assert held.counts["first forward"].keys() == fresh.counts["first forward"].keys()


@pytest.mark.parametrize("zero", [None, *(Zero(stage=stage) for stage in (0, 1, 2, 3))])
def test_a_held_model_that_several_ranks_would_train_stays_too(zero) -> None:
    model = Small()
    parameters = list(model.parameters())
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        trace_step(lambda: model, spec(ranks=2, zero=zero))
    assert type(model) is Small
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert not any(vars(p) or p._backward_hooks for p in parameters)
    assert not any(p._post_accumulate_grad_hooks for p in parameters)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.cell = nn.LSTM(32, 32, batch_first=True)
        self.register_buffer("shift", torch.ones(32))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.last, _ = self.cell(self.table(tokens) + self.shift)
        return self.head(self.last)


def fails_late(model: nn.Module) -> nn.Module:
    model.half()
    raise ValueError("a reason")


@pytest.mark.parametrize("zero", [None, Zero(stage=3)])
@pytest.mark.parametrize(
    "build",
    [
        lambda model: model.bfloat16(),
        lambda model: model.to(torch.float64),
        lambda model: (model.cell.half(), model.half())[1],
        lambda model: nn.Sequential(model, nn.Linear(64, 64)).bfloat16(),
        lambda model: nn.Sequential(model.table.bfloat16(), nn.Linear(32, 64).bfloat16()),
        fails_late,
    ],
)
def test_a_held_model_that_build_casts_is_afterwards_what_it_was(build, zero) -> None:
    """However `build` reaches it: here as an argument of a partial."""
    model, tokens = Recurrent(), torch.arange(8).view(2, 4)
    expected = model(tokens)
    expected.sum().backward()
    del model.last
    model.eval()
    tensors = [*model.parameters(), *model.buffers()]
    gradients, kinds = [x.grad for x in tensors], [type(x) for x in model.modules()]
    failing = pytest.raises(ConfigError, match="a reason") if build is fails_late else nullcontext()
    with failing:
        trace_step(functools.partial(build, model), spec(zero=zero, ranks=1 if zero is None else 2))
    assert not model.training
    assert "last" not in vars(model)
    now = [*model.parameters(), *model.buffers()]
    assert all(x is y for x, y in zip(now, tensors, strict=True))
    assert all(x.grad is y for x, y in zip(now, gradients, strict=True))
    assert [type(x) for x in model.modules()] == kinds
    assert not any(x._forward_hooks or x._forward_pre_hooks for x in model.modules())
    assert torch.equal(model(tokens), expected)
    assert model.half().cell.weight_hh_l0.dtype == torch.float16, "what is later stays"


def test_a_held_model_that_is_cast_and_had_gradients_is_forecast_as_a_new_one() -> None:
    model = Recurrent()
    model(torch.arange(8).view(2, 4)).sum().backward()
    held = trace_step(functools.partial(nn.Module.bfloat16, model), spec())
    fresh = trace_step(lambda: Recurrent().bfloat16(), spec())
    assert (held.peak(), held.counts) == (fresh.peak(), fresh.counts)


def test_a_model_that_another_thread_casts_meanwhile_stays_cast() -> None:
    other = nn.Linear(2, 2)

    def build() -> nn.Module:
        thread = threading.Thread(target=other.half)
        thread.start()
        thread.join()
        return Small()

    trace_step(build, spec())
    assert other.weight.dtype == torch.float16


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(64, 64), nn.LayerNorm(64), nn.Linear(64, 64, bias=False))
    model[2].weight = model[0].weight
    return model


REAL = tied()


@pytest.mark.parametrize(
    ("build", "width"),
    [
        (lambda: tied().bfloat16(), 2),
        (lambda: tied().to("cpu", torch.float16), 2),
        (lambda: tied().float(), 4),
        (lambda: tied().double().half(), 2),
        (lambda: copy.deepcopy(REAL), 4),
        (lambda: copy.deepcopy(REAL).double(), 8),
    ],
)
def test_build_may_move_and_cast_its_model(build, width) -> None:
    assert trace_step(build, spec()).state_bytes["parameters"] == width * (64 * 64 + 2 * 64)


class Reads(Small):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * float(self.table(tokens).sum())


def raises(*_: Any) -> Any:
    raise ValueError("a reason")


@pytest.mark.parametrize(
    ("build", "changes", "said"),
    [
        (raises, {}, r"build\(\) does not run .*ValueError: a reason"),
        (Small, {"inputs": raises}, "making the inputs does not run .*a reason"),
        (Small, {"loss": raises}, "the loss does not run .*a reason"),
        (Small, {"optimizer": raises}, "making the optimizer does not run .*a reason"),
        (Reads, {}, "the loss does not run .*It reads numbers"),
        (nn.Linear(2, 2), {}, "build: got a Linear, .*give `lambda: model`"),
        (Small, {"loss": lambda m, b: m(b["tokens"]).sum(-1)}, r"loss: returned .*as \.mean\(\)"),
        (lambda: None, {}, "build: returned a NoneType"),
        (lambda: Small().to("meta"), {}, r"is on meta; .*leave out device\('meta'\)"),
    ],
)
def test_what_has_no_forecast_is_told_by_its_stage(build, changes, said) -> None:
    with pytest.raises(ConfigError, match=said):
        trace_step(build, spec(**changes))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_mode_does_not_reach_the_step(mode) -> None:
    with mode():
        assert trace_step(Small, spec()).counts["first backward"]


@pytest.mark.parametrize(
    ("field", "value"), [("zero", 2), ("wire", "int8"), ("device", "foo"), ("device", 0)]
)
def test_fields_of_another_type_are_named(field, value) -> None:
    with pytest.raises(ConfigError, match=f"{field}: got {value!r}, allowed is a"):
        spec(**{field: value})


def frozen(model: nn.Module) -> nn.Module:
    model.table.requires_grad_(False)
    for parameter in model.cell.parameters():
        parameter.requires_grad = not parameter.requires_grad
    return model


@pytest.mark.parametrize(
    "build",
    [
        frozen,
        lambda model: frozen(model).bfloat16(),
        lambda model: frozen(model.bfloat16()),
        lambda model: frozen(frozen(model)),
        lambda model: model.requires_grad_(False),
    ],
)
def test_what_build_freezes_of_a_held_model_is_frozen_in_the_forecast_alone(build) -> None:
    model = Recurrent()
    model.cell.weight_hh_l0.requires_grad_(False)
    before = [(x, x.requires_grad) for x in model.parameters()]
    with suppress(ConfigError):  # nothing is left to train
        trace_step(functools.partial(build, model), spec())
    assert [x.requires_grad for x in model.parameters()] == [wanted for _, wanted in before]
    assert all(x is y for x, (y, _) in zip(model.parameters(), before, strict=True))
