"""What has no forecast, and why; and what numbers an optimizer may read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lezero.core.errors import ConfigError
from tests.plan.test_forecast import foresee, tiny


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch", 0),
        ("tokens", -1),
        ("accumulate", 1.5),
        ("precision", "fp8"),
        ("form", "fast"),
        ("attention", "mine"),
        ("clip", "x"),
        ("pool", 1),
        ("saves", None),
        ("loss", 3),
        ("inputs", 3),
        ("optimizer", "adam"),
    ],
)
def test_bad_steps_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        foresee(**{field: value})


@pytest.mark.parametrize("seconds", [-1, "x", True, float("nan")])
def test_a_bad_budget_is_named(seconds: object) -> None:
    with pytest.raises(ConfigError, match="budget_s: got"):
        foresee(budget_s=seconds)


@pytest.mark.parametrize("name", ["Adafactor", "ASGD"])
def test_an_optimizer_may_read_numbers(name: str) -> None:
    """Of its own state. Its bytes are those of a real one."""
    make = getattr(torch.optim, name)
    found = foresee(optimizer=lambda model: make(model.parameters()), budget_s=0)
    model = tiny()
    real = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    real.step()
    states = [s for state in real.state.values() for s in state.values()]
    assert found.state_bytes["optimizer"] == sum(s.nbytes for s in states if torch.is_tensor(s))


def test_an_optimizer_that_waits_for_a_number_has_no_forecast() -> None:
    class Waits(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            (one, *_) = self.param_groups[0]["params"]
            while float(one.square().sum()) > 1e-9:
                one.mul_(0.5)

    with pytest.raises(ConfigError, match="no forecast: the optimizer's step"):
        foresee(optimizer=lambda model: Waits(model.parameters(), lr=0.1), budget_s=0)


def test_sparse_gradients_are_explained() -> None:
    def sparse() -> nn.Module:
        return nn.Sequential(nn.Embedding(256, 16, sparse=True), nn.Linear(16, 256))

    with pytest.raises(ConfigError, match=r"is sparse_coo, .* with sparse=False"):
        foresee(sparse, optimizer=lambda model: torch.optim.SparseAdam(model[0].parameters()))


def test_a_model_that_reads_numbers_is_explained() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Embedding(256, 256)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.inner(tokens)
            return hidden * 2 if float(hidden.detach().sum()) > 0 else hidden

    with pytest.raises(ConfigError, match="no forecast"):
        foresee(Reads)


def test_a_frozen_model_is_refused() -> None:
    def frozen() -> nn.Module:
        return tiny().requires_grad_(False)

    with pytest.raises(ConfigError, match="no trainable parameter"):
        foresee(frozen)
