"""How many bytes a link sends: counted where they are handed over, and the formula beside it.

Payload bytes that this rank sends to others; what stays in the memory of a host counts nothing, and
neither do the headers of the network below (docs/wires.md).
"""

from __future__ import annotations

from collections import Counter

from lezero.comm.codec import Codec

OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce")


class Account:
    """Bytes by operation. `take` closes a step."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        """Bytes sent since the link was made, by operation."""
        self._taken: Counter[str] = Counter()

    def add(self, operation: str, nbytes: int) -> None:
        self.total[operation] += nbytes

    def take(self) -> dict[str, int]:
        """Bytes by operation since the last call of `take`: a step's, when called once a step."""
        since = {name: self.total[name] - self._taken[name] for name in OPERATIONS}
        self._taken = self.total.copy()
        return since


def sent_bytes(
    operation: str,
    numel: int,
    itemsize: int,
    *,
    topology: str,
    size: int,
    hosts: int,
    codec: Codec | None,
    gather: Codec | None,
) -> int:
    """Bytes that each rank sends for one collective on a tensor of `numel` elements (the whole).

    `itemsize`: bytes an element; `hosts`: how many; None: no codec. With P partners, which are the
    other ranks (flat), the other hosts (hierarchical) or nobody (shared), and the payload S of one
    of `size` chunks: P · S for a reduce-scatter or an all-gather, twice that for an all-reduce.
    """
    partners = {"flat": size - 1, "hierarchical": hosts - 1, "shared": 0}[topology]
    used = gather if operation == "all_gather" else codec
    chunk = numel // size
    payload = chunk * itemsize if used is None else used.bytes(chunk)
    return partners * payload * (2 if operation == "all_reduce" else 1)
