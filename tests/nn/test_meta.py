"""Modules with their parameters on the meta device and their buffers real."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lezero.nn.meta import parameters_on_meta


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4, padding_idx=0)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.kept = [torch.ones(2)]


def test_only_parameters_lose_their_memory_and_ties_stay():
    with parameters_on_meta():
        made = Turning()
    assert all(parameter.is_meta for parameter in made.parameters())
    assert made.head.weight is made.embedding.weight
    assert not made.frozen.requires_grad
    assert torch.equal(made.angles, torch.arange(4.0))
    assert torch.equal(made.norm.running_var, torch.ones(4))
    assert made.kept[0].device.type == "cpu"
    other = Turning()
    assert not any(x.is_meta for x in [*other.parameters(), *other.buffers()])
    made.load_state_dict(other.state_dict(), assign=True)
    assert not any(x.is_meta for x in made.parameters())


def test_an_error_inside_ends_it_and_lazy_parameters_stay():
    with parameters_on_meta():
        lazy = nn.LazyLinear(4)
    with pytest.raises(RuntimeError, match="mine"), parameters_on_meta():
        raise RuntimeError("mine")
    assert nn.parameter.is_lazy(lazy.weight)
    assert not nn.Linear(2, 2).weight.is_meta
