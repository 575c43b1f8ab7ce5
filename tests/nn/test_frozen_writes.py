"""Frozen parameters that a forward pass writes are found and put back, whatever way it writes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lezero.nn.frozen_writes import frozen_writes


def frozen(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)


class Teacher(nn.Module):
    """Writes in each of the ways that people do; `still` stays."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        for name in ("mul", "data", "other", "foreach", "out", "part", "object", "still"):
            self.register_parameter(name, frozen(3))
        self.empty, self.twin = frozen(0), self.mul

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mul.mul_(0.5).add_(1.0)
        self.data.data.add_(1.0)
        self.other.data = self.other.data + 1.0
        torch._foreach_add_([self.foreach], 1.0)
        torch.add(self.out, 1.0, out=self.out.data)
        self.part[1:].copy_(x[0])
        self.object = frozen(3)
        self.still + 1.0
        return self.line(x)


def test_each_way_of_writing_is_found_and_put_back() -> None:
    model = Teacher()
    x = torch.ones(1, 2)
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    found = frozen_writes(model, lambda: model(x))
    assert {name for module, name in found} == {
        *("mul", "data", "other", "foreach", "out", "part", "object"),
    }
    assert all(module is model for module, _ in found)
    for name, parameter in model.named_parameters():
        assert (id(parameter), parameter.data_ptr()) == before[name]
        assert name.startswith("line") or not parameter.any(), name
    model(x)
    assert torch.equal(model.mul, torch.ones(3))


def test_two_parameters_that_share_memory_are_both_put_back() -> None:
    whole = torch.zeros(4)
    model = nn.Module()
    model.first = nn.Parameter(whole[:2], requires_grad=False)
    model.second = nn.Parameter(whole[2:], requires_grad=False)
    found = frozen_writes(model, lambda: model.second.fill_(1.0))
    assert [name for _, name in found] == ["first", "second"]
    assert not whole.any()


def test_nothing_runs_where_nothing_is_frozen() -> None:
    assert frozen_writes(nn.Linear(2, 2), lambda: pytest.fail("ran")) == []


def test_a_pass_that_fails_leaves_nothing_either() -> None:
    model = Teacher()
    with pytest.raises(RuntimeError, match="must match the size"):
        frozen_writes(model, lambda: model(torch.ones(1, 5)))
    assert not model.mul.any()
