"""Which collective is to be expected after those before it: all ranks have seen the same ones, so
all expect the same, and where two part at most one of them does what is expected."""

from __future__ import annotations

_PLACES = 1 << 14
_FAR, _FAR_BITS = 2 * 0x9E3779B97F4A7C15, (1 << 256) - 1
"""A rolling product whose factor is even: what came 256 before has no part in it any more."""
_NEAR_BITS = (1 << 64) - 1
_MOST = 3  # votes that a candidate keeps: so many others, and one more, take its place

_Table = dict[int, tuple[int, int]]
"""By place (of 256, its hash): the candidate and its votes."""


class Usual:
    """Remembers what followed.

    [Note: one expectation]
    What mostly followed the 256 before it, where they are known; else what mostly followed the two
    before it. Two alone are too few in a steady loop: at stage 3 the same two gathers of a block
    have other calls behind them in forward and in backward, and behind a backward comes another one
    or the end of accumulation. 256 alone are new for long after each evaluation. Several things
    that are all expected would not do: ranks part just where several are possible.
    """

    def __init__(self) -> None:
        self._far: _Table = {}
        self._near: _Table = {}
        self._far_place = self._near_place = 0

    def take(self, kind: int) -> bool:
        """Whether the next one was to be expected. kind: a number from 1 up."""
        far, near = hash(self._far_place), self._near_place
        self._far_place = (self._far_place * _FAR + kind) & _FAR_BITS
        self._near_place = (near << 32 | kind) & _NEAR_BITS
        here, there = self._far.get(far), self._near.get(near)
        if here == there == (kind, _MOST):
            return True
        expected = here or there
        _vote(self._far, far, here, kind)
        _vote(self._near, near, there, kind)
        return expected is not None and expected[0] == kind


def _vote(table: _Table, place: int, found: tuple[int, int] | None, kind: int) -> None:
    if found is None and len(table) >= _PLACES:  # places that never come again
        table.clear()
    candidate, votes = found or (kind, 0)
    if candidate == kind:
        table[place] = candidate, min(votes + 1, _MOST)
    else:
        table[place] = (candidate, votes - 1) if votes else (kind, 1)
