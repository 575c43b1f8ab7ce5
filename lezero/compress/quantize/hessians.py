"""How many Hessians are held at a time.

[Note: Hessians of a block]
K inputs have one of 4 K² bytes, so those of all experts in a block may take many times as much as
the block. As much is held at a time as memory is promised for: a block and the largest Hessian,
which is all of them where layers are not very narrow. The rest come from further runs of the block,
in which every layer is still as it was: each is calibrated on what the float layers before it in
its block give, however many runs there are; but where channels are scaled, the Hessians of later
runs are of scaled inputs, and equal up to rounding. What is quantized waits beside the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from torch import nn

from lezero.compress.quantize.capture import Capture
from lezero.compress.quantize.inputs import Inputs
from lezero.compress.quantize.layer import linear_user
from lezero.compress.quantize.scheme import Target
from lezero.compress.quantize.sites import Site

# Bytes of Hessians that layers outside of blocks may have at a time; more runs of the model beyond.
_OUTSIDE = 1 << 28
Sites = list[tuple[Site, Target]]


class Room:
    """Bytes for Hessians, and one of them in any case."""

    def __init__(self, most: float) -> None:
        self._left, self._empty = most, True

    def take(self, size: int) -> bool:
        """Whether there is room for one of `size` bytes, which it has then."""
        if size > self._left and not self._empty:
            return False
        self._left, self._empty = self._left - size, False
        return True


def hessian_bytes(site: Site) -> int:
    return 4 * site.weight().shape[1] ** 2 if site.kind == "linear" else 0


def room_of_block(block: nn.Module, sites: Sites) -> Room:
    """See [Note: Hessians of a block]."""
    largest = max(hessian_bytes(site) for site, _ in sites)
    return Room(sum(p.nbytes for p in block.parameters()) + largest)


def outside_of_blocks(sites: Sites, needed: bool) -> list[Sites]:
    """Parts of them whose Hessians together are not much, and at least one layer each."""
    parts, room = [Sites()], Room(_OUTSIDE if needed else math.inf)
    for site, target in sites:
        # Whichever layer of a tied weight will count, all that data comes through have one.
        size = hessian_bytes(site) * sum(user.kind == "linear" for user in site.users)
        if size and not room.take(size):
            room = Room(_OUTSIDE)
            room.take(size)
            parts.append([])
        parts[-1].append((site, target))
    return parts if sites else []


def as_they_come(
    sites: Sites, known: dict[str, Inputs], needed: bool, again: Callable[[Sites], Capture]
) -> Iterator[tuple[Sites, bool]]:
    """Parts of a block's layers that have their Hessians in `known`, where any are `needed`, and
    whether it is the last part. again: watches these layers in another run of the block."""
    left = sites
    while left:
        lack = [x for x in left if needed and _lacks(known, x[0])]
        ready = [x for x in left if x not in lack]
        yield ready, not lack
        for name in (user.name for site, _ in ready for user in site.users):
            if name in known:
                known[name].hessian = known[name].factor = None
        if lack:
            _fill(known, lack, again(lack).inputs)
        left = lack


def _lacks(known: dict[str, Inputs], site: Site) -> bool:
    """Whether data came through the layer that counts, and its Hessian is not there."""
    seen = known.get(linear_user(site, known).name) if site.kind == "linear" else None
    return seen is not None and seen.hessian is None


def _fill(known: dict[str, Inputs], sites: Sites, found: dict[str, Inputs]) -> None:
    for name in (linear_user(site, known).name for site, _ in sites):
        if name in found:
            known[name].hessian = found[name].hessian
        elif known[name].hessian is None:  # an expert that gets no token any more: zeros
            K = len(known[name].absmax)
            known[name].hessian = known[name].absmax.new_zeros(K, K)
