"""What ranks tell each other before a step, in one sum: counts, wishes, and whether they have the
same options."""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

import torch

from lezero.core import groups
from lezero.core.errors import UnlikeError
from lezero.train.options import OURS

_MARKS = 1 << 20
"""So many that the sum of their squares over thousands of ranks is exact in 64 bits."""
_ALIKE = 1e-6
"""Floats nearer than this are the same: processors of different makers differ in a cosine."""
Options = dict[str, Any]


class Agreed(NamedTuple):
    """Over all ranks: counted units, on how many of them a stop was asked for, the sum of what says
    how outdated their gradients are, and whether each counted as many units."""

    counted: int
    stops: int
    outdated: int
    alike: bool


def before_step(
    count: int, stop: bool, outdated: int, optimizer: torch.optim.Optimizer, **others: Any
) -> Agreed:
    """Raises `UnlikeError` on every rank where options of the optimizer's groups or `others`
    differ: replicas would drift apart, and no error would ever say so. Not where a rank's gradients
    are outdated: who renews them says more of groups that one rank alone has.

    Numbers, texts and lists of them are compared; what lies in tensors is not, since to read it
    waits for an accelerator.
    """
    every = [others, *optimizer.param_groups]
    values = [[_rounded(group[key]) for key in _compared(group)] for group in every]
    mine = torch.tensor([count, int(stop), outdated, *_marked(count), *_marked(values)])
    *sums, counts, squares, marks, their_squares = groups.all_reduce_sum(mine, "counts").tolist()
    counted, stops, late = sums
    found = Agreed(counted, stops, late, _equal(counts, squares))
    if not _equal(marks, their_squares) and not late:
        _compare(groups.gather_objects(_named(others, optimizer)))
    return found


def _marked(value: Any) -> tuple[int, int]:
    """A mark of the value, and its square."""
    mark = zlib.crc32(repr(value).encode()) % _MARKS
    return mark, mark * mark


def _equal(total: int, squares: int) -> bool:
    """Equal numbers, and no others, have a mean square that is the square of their mean."""
    return groups.world_size() * squares == total * total


def _compared(group: Options) -> list[str]:
    return sorted(key for key, x in group.items() if key not in OURS and _is_plain(x))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _rounded(value: Any) -> Any:
    """So that numbers which are the same are so in their texts, nearly always."""
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{float(value):.6g}" if number else value


def _named(others: Options, optimizer: torch.optim.Optimizer) -> Options:
    found = {key: others[key] for key in _compared(others)}
    for number, group in enumerate(optimizer.param_groups):
        for key in _compared(group):
            found[f"{key} of group {number} of the optimizer"] = group[key]
    return found


def _compare(every: list[Options]) -> None:
    for rank, theirs in enumerate(every):
        for key in dict.fromkeys([*every[0], *theirs]):
            ours, other = every[0].get(key, "nothing"), theirs.get(key, "nothing")
            if not _alike(ours, other):
                raise UnlikeError(
                    f"'{key}' is {ours!r} on rank 0 but {other!r} on rank {rank}, so that their "
                    "models would drift apart; set it on every rank alike, before the same step"
                )


def _alike(one: Any, two: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(map(_alike, one, two))
    if isinstance(one, int | float) and isinstance(two, int | float):
        both_nan = one != one and two != two
        return both_nan or math.isclose(one, two, rel_tol=_ALIKE)
    return bool(one == two)
