"""What ranks tell each other before a step, in one sum: counts, wishes, and whether they have the
same options."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch

from lezero.core import groups
from lezero.parallel.zero.agreement import agree

_MARKS = 1 << 20
"""So many that the sum of their squares over thousands of ranks is exact in 64 bits."""
_OURS = ("params", "engine_lr", "scheduled_lr", "initial_lr")
_PLAIN = (bool, int, float, str, tuple, type(None))


class Agreed(NamedTuple):
    """Over all ranks: counted units, and on how many ranks the others hold."""

    counted: int
    stops: int
    outdated: int


def before_step(count: int, stop: bool, outdated: bool, options: dict[str, Any]) -> Agreed:
    """Raises `DistributedError` on every rank where `options` differ: replicas would drift apart,
    and no error would ever say so. Not where a rank's gradients are outdated: who renews them says
    more of groups that one rank alone has.
    """
    mark = zlib.crc32(repr(options).encode()) % _MARKS
    mine = torch.tensor([count, int(stop), int(outdated), mark, mark * mark])
    *sums, marks, squares = groups.all_reduce_sum(mine, "counts").tolist()
    # Equal numbers, and no others, have a mean square that is the square of their mean.
    found = Agreed(*sums)
    if groups.world_size() * squares != marks * marks and not found.outdated:
        agree("Engine.train_step", options)
    return found


def options_of(optimizer: torch.optim.Optimizer, **others: Any) -> dict[str, Any]:
    """Plain options of an optimizer's groups by name, and `others`. Those in tensors are left out:
    to read them waits for an accelerator."""
    found = dict(others)
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in _OURS and isinstance(value, _PLAIN):
                found[f"{key} of group {number} of the optimizer"] = value
    return found
