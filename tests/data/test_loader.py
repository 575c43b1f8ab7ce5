"""Batches: the same global batch at any world size, no sample repeated or skipped on resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lezero.core.errors import ConfigError
from lezero.data import EvalLoader, Loader


class Numbers:
    """Row i holds the number i, so that a batch tells which rows it took."""

    digest = "numbers"

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.full(3, index, np.int64)
        return tokens, tokens + 1


def step(loaders: list[Loader]) -> list[int]:
    """The rows of one global batch, in order."""
    return torch.cat([next(loader)["tokens"][:, 0] for loader in loaders]).tolist()


def ranks(world: int, rows: Numbers, batch: int, seed: int) -> list[Loader]:
    return [Loader(rows, batch, seed=seed, rank=r, world=world) for r in range(world)]


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 60),
    seed=st.integers(0, 1000),
    plan=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 3), st.integers(0, 4)),
        min_size=1,
        max_size=5,
    ),
)
def test_resume_at_other_world_sizes_repeats_and_skips_nothing(length, seed, plan):
    """Each part of `plan` is (world, rows a rank, steps); the state goes from part to part."""
    rows, taken, state = Numbers(length), [], None
    for world, per_rank, steps in plan:
        loaders = ranks(world, rows, world * per_rank, seed)
        for loader in loaders:
            if state is not None:
                loader.seek(state)
        for _ in range(steps):
            taken += step(loaders)
        states = [loader.state() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
    single = Loader(rows, 1, seed=seed)
    assert taken == [int(next(single)["tokens"][0, 0]) for _ in taken]
    for start in range(0, len(taken) - length + 1, length):
        assert sorted(taken[start : start + length]) == list(range(length))


def test_batch_shape_and_types():
    batch = next(Loader(Numbers(5), 4))
    assert set(batch) == {"tokens", "targets"}
    for tensor in batch.values():
        assert tensor.shape == (4, 3)
        assert tensor.dtype == torch.int64
    assert torch.equal(batch["targets"], batch["tokens"] + 1)


def test_a_loader_shows_where_it_is():
    loader = Loader(Numbers(12), 4, rank=1, world=2)
    next(loader)
    assert repr(loader) == "<Loader: 12 rows, batch 4, rank 1 of 2, 4 samples taken>"


def test_a_batch_whose_reading_was_interrupted_comes_next():
    class Slow(Numbers):
        stops = True

        def row(self, index):
            if index == 5 and self.stops:
                self.stops = False
                raise KeyboardInterrupt
            return super().row(index)

    loader, taken = Loader(Slow(12), 3), []
    while len(taken) < 12:
        try:
            taken += step([loader])
        except KeyboardInterrupt:
            assert loader.samples == len(taken)
    assert sorted(taken) == list(range(12))


def test_state_of_other_data_is_refused():
    loader = Loader(Numbers(10), 2, seed=1)
    good = loader.state()
    for change in ({"digest": "x"}, {"rows": 9}, {"seed": 2}, {"format": 99}, {"samples": -1}):
        with pytest.raises(ConfigError):
            loader.seek({**good, **change})
    with pytest.raises(ConfigError, match=r"files, .* \(0123456789ab\) and of this run"):
        loader.seek({**good, "digest": "0123456789abcdef"})
    with pytest.raises(ConfigError, match=r"the seed of the checkpoint \(2\) and of this run"):
        loader.seek({**good, "seed": 2, "digest": "of another split"})
    with pytest.raises(ConfigError, match="not a loader's state"):
        loader.seek({"samples": 3})
    assert loader.state() == good


def test_batches_that_ranks_cannot_share_are_refused():
    with pytest.raises(ConfigError, match="use a multiple of 2"):
        Loader(Numbers(10), 3, world=2)
    with pytest.raises(ConfigError, match="allowed is 0 to 1"):
        Loader(Numbers(10), 2, rank=2, world=2)
    for rank in (5, -1):
        with pytest.raises(ConfigError, match=f"rank: got {rank}, allowed is 0 to 1"):
            EvalLoader(Numbers(10), 4, rank=rank, world=2)
    with pytest.raises(ConfigError, match="limit: got -1"):
        EvalLoader(Numbers(10), 4, limit=-1)
    with pytest.raises(ConfigError, match="world: got 0"):
        Loader(Numbers(10), 4, world=0)
    with pytest.raises(ConfigError, match="no row"):
        Loader(Numbers(0), 2)


@pytest.mark.parametrize(
    ("tokens", "targets", "text"),
    [
        (np.full(3, 0.5), np.zeros(3, np.int64), "row 4: its tokens are float64"),
        (np.zeros(3, np.uint16), np.full(3, 0.9, np.float32), "row 4: its targets are float32"),
        (np.zeros(2, np.int64), np.zeros(3, np.int64), r"row 4: its tokens have the shape \(2,\)"),
    ],
)
def test_rows_that_are_no_ids_or_of_another_length_are_named(tokens, targets, text):
    class Odd(Numbers):
        def row(self, index):
            return (tokens, targets) if index == 4 else super().row(index)

    with pytest.raises(ConfigError, match=text):
        list(EvalLoader(Odd(6), 6))
    loader = Loader(Odd(6), 6)
    with pytest.raises(ConfigError, match="row"):
        next(loader)
    assert loader.samples == 0


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_validation_covers_every_row_once_with_equal_batches(world, length):
    loaders = [EvalLoader(Numbers(length), 4, rank=r, world=world) for r in range(world)]
    counted = [
        int(row)
        for loader in loaders
        for batch in loader
        for row, target in zip(batch["tokens"][:, 0], batch["targets"][:, 0], strict=True)
        if target != -100
    ]
    assert sorted(counted) == list(range(length))
    assert len({len(list(loader)) for loader in loaders}) == 1
    assert {b["tokens"].shape for loader in loaders for b in loader} == {(4 // world, 3)}


def test_validation_limit():
    assert len(list(EvalLoader(Numbers(100), 4, limit=3))) == 3
