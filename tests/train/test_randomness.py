"""What is drawn within a micro-batch belongs to it, whoever computes it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from lezero.core import device
from lezero.train.randomness import seeded


def drawn(*place: int) -> tuple[float, ...]:
    with seeded(*place):
        return tuple(torch.rand(4).tolist())


def test_each_seed_step_and_micro_batch_draws_numbers_of_its_own_again_and_again():
    places = list(itertools.product((0, 1), (0, 1, 11), (0, 1, 11)))
    before = torch.get_rng_state()
    found = [drawn(*place) for place in places]
    assert len(set(found)) == len(places)
    assert [drawn(*place) for place in reversed(places)] == found[::-1]
    assert torch.equal(torch.get_rng_state(), before)


def test_it_draws_what_torch_would_from_the_seed():
    with seeded(3, 1, 2):
        used, mine = torch.initial_seed(), torch.rand(5)
    torch.manual_seed(used)
    assert torch.equal(torch.rand(5), mine)


def test_every_device_that_is_seeded_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.tensor([7]), torch.tensor([8])]
    seeds: list[int] = []

    def seed(number: int) -> None:
        seeds.append(number)
        states[:] = [torch.tensor([number]) for _ in states]

    cuda = SimpleNamespace(
        get_rng_state=lambda index: states[index],
        set_rng_state=lambda state, index: states.__setitem__(index, state),
        manual_seed=seed,
        manual_seed_all=seed,
    )
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    with seeded(3, 1, 2):
        assert [int(state) for state in states] == seeds * 2
    assert [int(state) for state in states] == [7, 8]
