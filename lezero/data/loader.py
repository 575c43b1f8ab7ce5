"""Rows to batches. A cursor counts samples over all ranks, so a resume repeats and skips none.

Sample s is row `Order(seed, rows).at(s)`. One step takes the samples cursor .. cursor + batch; rank
r of w takes the r-th of w equal, contiguous parts. The same global batch therefore comes at any
world size and any accumulation. Reading is a copy from mapped memory (microseconds a row), so there
is no background thread to feed, stop or resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lezero.core.errors import ConfigError
from lezero.data import order
from lezero.data.order import Order

if TYPE_CHECKING:
    import torch

    Batch = dict[str, torch.Tensor]

IGNORED = -100


class Rows(Protocol):
    """A data set: rows of equal length, reachable by number.

    The loader asks for `len`, then for single rows in any order, from one thread. `digest` names
    the content: a resume refuses data of another digest.
    """

    digest: str

    def __len__(self) -> int: ...

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """tokens (T,) and targets (T,) as int64; a target of -100 carries no loss."""
        ...


class Loader:
    """An endless iterator over this rank's part of each global batch.

    rows: the data. batch: sequences of one step over all ranks. seed: of the order.
    rank, world: this process and how many there are.
    """

    def __init__(
        self, rows: Rows, batch: int, *, seed: int = 0, rank: int = 0, world: int = 1
    ) -> None:
        _check_shares(batch, rank, world)
        if len(rows) < 1:
            raise ConfigError("rows: got no row, needed is at least 1; give the data more text")
        self.rows, self.batch, self.rank, self.world = rows, batch, rank, world
        self.order = Order(seed, len(rows))
        self.samples = 0
        """Samples taken so far by all ranks together."""

    def __repr__(self) -> str:
        return (
            f"<Loader: {len(self.rows):,} rows, batch {self.batch}, rank {self.rank} of "
            f"{self.world}, {self.samples:,} samples taken>"
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        indices = [self.order.at(sample) for sample in self.mine(self.samples)]
        batch = _collate(indices, [self.rows.row(index) for index in indices])
        self.samples += self.batch  # once all is read: who is interrupted gets this batch next
        return batch

    def mine(self, start: int) -> range:
        """The samples of the step that starts at `start` which belong to this rank."""
        part = self.batch // self.world
        return range(start + self.rank * part, start + (self.rank + 1) * part)

    @property
    def epoch(self) -> float:
        """Passes over the data so far, fractions included."""
        return self.samples / len(self.rows)

    def state(self) -> dict[str, Any]:
        """Where the loader is; the same on every rank and at every world size."""
        return {
            "format": order.FORMAT,
            "samples": self.samples,
            "seed": self.order.seed,
            "rows": len(self.rows),
            "digest": self.rows.digest,
        }

    def seek(self, state: dict[str, Any]) -> None:
        """Goes where `state` was taken. `ConfigError` when data, seed or order differ."""
        now = self.state()
        if set(state) != set(now):
            raise ConfigError(f"not a loader's state: it has {sorted(state)}")
        if state["format"] != now["format"]:
            raise ConfigError(
                f"the checkpoint's data order has format {state['format']}, "
                f"this version has {now['format']}"
            )
        for name, what in (
            ("seed", "seed"),
            (
                "digest",
                "text or the order of its files, tokenizer, sequence, or how it was split for "
                "validation,",
            ),
            ("rows", "rows"),
        ):
            if state[name] != now[name]:
                then, here = (str(one[name])[:12] for one in (state, now))
                raise ConfigError(
                    f"data: the {what} of the checkpoint ({then}) and of this run "
                    f"({here}) differ, so samples would repeat or be skipped; "
                    "use the same data, or start a new run"
                )
        samples = state["samples"]
        if not isinstance(samples, int) or isinstance(samples, bool) or samples < 0:
            raise ConfigError(f"samples: got {samples!r}, allowed is a count")
        self.samples = samples


class EvalLoader:
    """Every row once, in order, split over the ranks; iterate it again for the same batches.

    batch: sequences of one step over all ranks. limit: at most this many steps. All ranks get the
    same number of batches of the same shape: what is missing at the end are rows without loss, so a
    mean weighted by counted tokens over all ranks is the mean over the data.
    """

    def __init__(
        self, rows: Rows, batch: int, *, rank: int = 0, world: int = 1, limit: int | None = None
    ) -> None:
        _check_shares(batch, rank, world)
        if limit is not None and limit < 0:
            raise ConfigError(f"limit: got {limit}, allowed is a count of steps, or None for all")
        self.rows, self.batch, self.rank, self.world = rows, batch, rank, world
        steps = -(-len(rows) // batch)
        self.steps = steps if limit is None else min(steps, limit)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        part = self.batch // self.world
        for step in range(self.steps):
            first = step * self.batch + self.rank * part
            indices = range(first, first + part)
            read = [index if index < len(self.rows) else 0 for index in indices]
            yield _collate(read, [self._row(index) for index in indices])

    def _row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index < len(self.rows):
            return self.rows.row(index)
        tokens, targets = self.rows.row(0)
        return tokens, np.full_like(targets, IGNORED)


def _check_shares(batch: int, rank: int, world: int) -> None:
    if world < 1:
        raise ConfigError(f"world: got {world}, allowed is a count from 1")
    if batch < 1 or batch % world:
        raise ConfigError(
            f"batch: got {batch}, which {world} rank(s) cannot share evenly; "
            f"use a multiple of {world}"
        )
    if not 0 <= rank < world:
        raise ConfigError(f"rank: got {rank}, allowed is 0 to {world - 1}")


def _collate(indices: Sequence[int], rows: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
    import torch

    parts = {"tokens": [row[0] for row in rows], "targets": [row[1] for row in rows]}
    return {
        name: torch.from_numpy(_stacked(name, indices, part).astype(np.int64, copy=False))
        for name, part in parts.items()
    }


def _stacked(name: str, indices: Sequence[int], given: list[np.ndarray]) -> np.ndarray:
    arrays = [np.asarray(part) for part in given]
    for index, array in zip(indices, arrays, strict=True):
        if array.dtype.kind not in "iu":
            raise ConfigError(
                f"row {index}: its {name} are {array.dtype}, allowed are whole numbers: ids of "
                "tokens, as int64"
            )
        if array.shape != arrays[0].shape:
            raise ConfigError(
                f"row {index}: its {name} have the shape {array.shape}, those of row {indices[0]} "
                f"{arrays[0].shape}; a batch is of rows of equal length: cut or pad them"
            )
    return np.stack(arrays)
