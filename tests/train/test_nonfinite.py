"""What is named when a loss or a gradient leaves the finite numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lezero.optim import AdamW
from lezero.train.engine import Engine
from lezero.train.nonfinite import find_culprit

Change = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """Owns no parameter itself, as the blocks of a transformer."""

    def __init__(self, after: Change, before: Change = lambda x: x) -> None:
        super().__init__()
        self.inner, self.before, self.after = nn.Linear(2, 2), before, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(x + self.inner(self.before(x)))


class Broken(torch.autograd.Function):
    """Its gradient is infinite."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0] * torch.inf, grads[0].sum(0)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Broken.apply(x, self.weight)


@pytest.mark.parametrize(
    ("after", "last", "said"),
    [
        (
            lambda x: x,
            Norm,
            "gradient at the input (the output of '0') of module '1', parameter 'weight'",
        ),
        (
            lambda x: x / 0,
            nn.Identity,
            "output of '0', right after the output of module '0.inner', parameter 'weight'",
        ),
        (
            lambda x: x,
            lambda: Block(lambda x: x, before=lambda x: x.abs() / 0),
            "input of '1.inner', right after the output of module '0.inner', parameter 'weight'",
        ),
    ],
)
def test_a_module_with_parameters_is_named(
    after: Change, last: Callable[[], nn.Module], said: str
) -> None:
    model = nn.Sequential(Block(after), last())
    x = torch.ones(3, 2)
    assert str(find_culprit(model, lambda: model(x).sum())) == said


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_batch_that_is_not_finite_blames_no_parameter(bad: float, sign: float) -> None:
    block = Block(lambda x: x)
    nn.init.constant_(block.inner.weight, sign)  # -1: the first output is of -inf, as a mask is
    model = nn.Sequential(block, nn.Linear(2, 1))
    x = torch.tensor([[1.0, bad]])
    assert str(find_culprit(model, lambda: model(x).sum())) == "input of module '0.inner'"


def test_a_mask_of_minus_infinity_is_no_bad_input() -> None:
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(x + mask).softmax(-1)

    model = Masked(2, 2)
    x, mask = torch.ones(1, 2), torch.full((1, 2), -torch.inf)
    said = str(find_culprit(model, lambda: model(x, mask=mask).sum()))
    where = "output, with -inf in its input,"
    assert said == f"{where} of module '(the model)', parameter 'weight'"


class Padded(nn.Linear):
    """Gives -inf for entries of the vocabulary that no token has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super().forward(x), torch.full((len(x), 1), -torch.inf)], 1)


def test_an_output_of_minus_infinity_is_no_cause_where_another_is_found() -> None:
    class Breaks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y + (y - y).abs().sqrt()  # value 0, gradient 0 · inf

    model = nn.Sequential(Breaks(2, 2), Padded(2, 2))
    x, targets = torch.ones(3, 2), torch.tensor([0, 1, 0])

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), targets)

    assert str(find_culprit(model, loss)) == "gradient of module '0', parameter 'bias'"
    model[0] = nn.Linear(2, 2)
    targets[0] = 2  # the entry that has -inf
    assert str(find_culprit(model, loss)) == "output of -inf of module '1', parameter 'weight'"


@pytest.mark.parametrize("form", ["sparse", "float8", "complex"])
@pytest.mark.parametrize("bad", [False, True])
def test_tensors_that_few_operations_know_are_judged(form: str, bad: bool) -> None:
    class Takes(nn.Linear):
        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.nan

    plain = torch.tensor([1.0, torch.nan if bad else 2.0])
    make = {"sparse": plain.to_sparse, "complex": plain.cfloat}
    other = make.get(form, lambda: plain.to(torch.float8_e4m3fn))()
    model = Takes(2, 2)
    said = str(find_culprit(model, lambda: model(torch.ones(1, 2), other).sum()))
    assert said.startswith("input" if bad else "output")


def test_a_step_whose_culprit_cannot_be_looked_for_is_skipped_all_the_same():
    """A hook cannot look at values below `vmap`."""

    class PerSample(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 1)

        def forward(self, x):
            return torch.func.vmap(self.line)(x).square().mean()

    model = PerSample()
    engine = Engine(model, AdamW(model), precision="fp32", compile="off")
    assert engine.train_step(torch.ones(3, 2)).skipped is None
    told = engine.train_step(torch.full((3, 2), torch.nan)).skipped
    assert "place not found (the step run again ended in RuntimeError)" in told


@pytest.mark.parametrize("kept", ["buffer", "frozen parameter"])
def test_what_the_bad_pass_wrote_is_not_blamed(kept: str) -> None:
    """A running centre is moved by the NaN of the batch; the second pass begins with it as it was
    before the step."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.centre = nn.Linear(2, 3), nn.Module()
            value = torch.zeros(3)
            if kept == "buffer":
                self.centre.register_buffer("value", value)
            else:
                self.centre.value = nn.Parameter(value, requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.line(x - self.centre.value.sum())
            with torch.no_grad():
                self.centre.value.lerp_(y.mean(0), 0.1)
            return y.square().mean()

    model = Centred()
    engine = Engine(
        model, torch.optim.SGD(model.line.parameters(), 0.1), precision="fp32", compile="off"
    )
    assert engine.train_step(torch.ones(3, 2)).skipped is None
    before = model.centre.value.clone()
    bad = torch.tensor([[torch.nan, 1.0]])
    assert "first at the input of module 'line'" in (engine.train_step(bad).skipped or "")
    assert torch.equal(model.centre.value, before)
