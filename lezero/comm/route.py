"""The extension point of topologies: how the chunks of a collective travel."""

from __future__ import annotations

import abc
import mmap
from typing import NamedTuple

import torch

from lezero.comm.pending import Steps


class Span(NamedTuple):
    """Elements `start` … `stop` of the flattened parameter `name` lie at `at` of a buffer."""

    name: str
    start: int
    stop: int
    at: int


Spans = tuple[Span, ...]


class Route(abc.ABC):
    """One topology. The link checks arguments and calls these; each returns a collective's steps.

    A step between two yields runs at its turn (see `pending`), so the k-th step of every collective
    may use channel k without caring what else is in flight. Arguments stay as they are until the
    steps end. `size` ranks; tensors are flat, contiguous, fp32 or bf16.
    """

    @abc.abstractmethod
    def reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, key: str, spans: Spans
    ) -> Steps:
        """`out` (n,) becomes the sum over the ranks of their chunk `rank` of `flat` (size · n,)."""

    @abc.abstractmethod
    def all_gather(self, shard: torch.Tensor, out: torch.Tensor, key: str) -> Steps:
        """`out` (size · n,) becomes the ranks' `shard`s (n,).

        A shard may lie in its place in `out`. Nothing is written there then: the shard may change
        while the others' come, and keeps what it has become.
        """

    @abc.abstractmethod
    def all_reduce(self, flat: torch.Tensor, key: str, spans: Spans) -> Steps:
        """`flat` (size · n,) becomes the sum over the ranks."""

    @abc.abstractmethod
    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in memory that this topology moves without a copy before."""

    def close(self) -> None:  # noqa: B027 - most topologies hold nothing of their own
        """Gives back groups and memory. Nothing is in flight."""


def untouched_zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU whose pages are taken when they are first touched.

    `torch.zeros` writes them all.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    pages = mmap.mmap(-1, numel * dtype.itemsize, access=mmap.ACCESS_COPY)
    return torch.frombuffer(pages, dtype=dtype)
