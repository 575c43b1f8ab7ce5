"""Where the rows of each parameter lie: pure arithmetic, the same on every rank.

[Note: chunks]
Rank r of n holds rows r·k … (r+1)·k of every parameter, k = ceil(rows / n): what DTensor calls
Shard(0); the last ranks may hold fewer rows or none. A segment is the memory that moves in one
collective: n chunks of equal length, chunk r for rank r. A large parameter is a segment of its own,
padded to n·k rows at its end, so that its whole copy is one contiguous tensor and its shard a view
of it: nothing is copied around a collective. Small ones are packed: chunk r holds the rows of rank
r of each of them in turn. A parameter without dims has its one element in every chunk; where codecs
make these differ, that of chunk 0 counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lezero.comm.route import Span

SOLO = 1 << 17
"""Elements from which a parameter is a segment of its own: copying 512 KiB a few times takes as
long as one more collective, some 0.15 ms."""


@dataclass(frozen=True)
class Rows:
    """How one parameter of `shape` is split over `ranks` ranks."""

    shape: tuple[int, ...]
    ranks: int

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def width(self) -> int:
        """Elements in a row."""
        return math.prod(self.shape[1:])

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def per_rank(self) -> int:
        """Rows of a full chunk."""
        return -(-self.rows // self.ranks) if self.shape else 1

    @property
    def chunk(self) -> int:
        """Elements that this parameter takes in each chunk."""
        return self.per_rank * self.width

    def range(self, rank: int) -> tuple[int, int]:
        """First row of `rank` and the row after its last."""
        if not self.shape:
            return 0, 1
        start = min(rank * self.per_rank, self.rows)
        return start, min(start + self.per_rank, self.rows)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        start, stop = self.range(rank)
        return (stop - start, *self.shape[1:]) if self.shape else ()

    def flat_range(self, rank: int) -> tuple[int, int]:
        """The same range in elements of the flattened parameter."""
        start, stop = self.range(rank)
        return start * self.width, stop * self.width


@dataclass(frozen=True)
class Place:
    """One parameter in a segment: its elements of chunk r lie at `at` … of that chunk."""

    name: str
    rows: Rows
    at: int


@dataclass(frozen=True)
class Layout:
    """A segment: `ranks` chunks of `chunk` elements."""

    places: tuple[Place, ...]
    ranks: int
    chunk: int

    @classmethod
    def of(cls, named: Sequence[tuple[str, tuple[int, ...]]], ranks: int) -> Layout:
        places, at = [], 0
        for name, shape in named:
            places.append(Place(name, Rows(shape, ranks), at))
            at += places[-1].rows.chunk
        return cls(tuple(places), ranks, at)

    @property
    def numel(self) -> int:
        return self.ranks * self.chunk

    @property
    def contiguous(self) -> bool:
        """Whether the whole parameters lie in one piece (see Note [chunks])."""
        return self.ranks == 1 or (len(self.places) == 1 and bool(self.places[0].rows.shape))

    def spans(self) -> tuple[Span, ...]:
        """Which element of which parameter lies where in the segment.

        A parameter without dims counts as one element for each rank, as the chunks have it.
        """
        found = []
        for place in self.places:
            for rank in range(self.ranks):
                start, stop = place.rows.flat_range(rank) if place.rows.shape else (rank, rank + 1)
                if stop > start:
                    found.append(Span(place.name, start, stop, rank * self.chunk + place.at))
        return tuple(found)

    def pieces(
        self, segment: torch.Tensor, place: Place, whole: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of views (in `segment`, in `whole`) that hold the same elements of one parameter.

        `whole` has the parameter's shape, any strides. Padding is in no pair.
        """
        rows = place.rows
        segment = segment[: self.numel]  # some buffers have padding behind
        if not rows.shape:
            yield segment.view(self.ranks, self.chunk)[:, place.at], whole.expand(self.ranks)
        elif self.contiguous:
            end = place.at + rows.numel
            yield segment[place.at : end].view(rows.shape), whole
        elif rows.numel:
            table = segment.view(self.ranks, self.chunk)[:, place.at : place.at + rows.chunk]
            full = rows.rows // rows.per_rank
            left = full * rows.per_rank
            inner = (rows.per_rank, *rows.shape[1:])
            yield table[:full].unflatten(1, inner), whole[:left].unflatten(0, (full, -1))
            if left < rows.rows:
                tail = (rows.rows - left, *rows.shape[1:])
                used = math.prod(tail)
                yield table[full, :used].view(tail), whole[left:]

    def shard(self, chunk: torch.Tensor, place: Place, rank: int) -> torch.Tensor:
        """The rows of `rank`, as a view of its chunk."""
        shape = place.rows.shard_shape(rank)
        return chunk[place.at : place.at + math.prod(shape)].view(shape)


class Part(NamedTuple):
    """What this rank holds of one parameter: rows `start` … `stop` of dim 0 of `shape`."""

    shape: tuple[int, ...]
    start: int
    stop: int
