"""The norm of all gradients, the same bits at every stage, and clipping by it.

[Note: a fixed partition]
The norm of a sum depends on how the sum is cut. So the cut is always by parameter and by the rows
that stage 3 would give each rank, partial sums of squares are taken in fp64, and their total is
exact (`math.fsum`), whatever order they come in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lezero.core import groups
from lezero.core.errors import ConfigError
from lezero.parallel.zero.held import HELD, Held, local
from lezero.parallel.zero.layout import Rows
from lezero.parallel.zero.lines import Lines

_PIECE = 1 << 18


def grad_norm(parameters: nn.Module | Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients, fp64, on every rank. Collective where the model is sharded.

    Parameters without a gradient do not count. Plain parameters count on each rank by themselves.
    """
    listed = _listed(parameters)
    sharded: dict[int, tuple[Lines, list[Held]]] = {}
    elsewhere: list[DTensor] = []  # FSDP2's
    squares: list[float] = []
    for parameter in listed:
        held: Held | None = getattr(parameter, HELD, None)
        if held is not None:
            lines = held.segment.unit.sharding.lines
            sharded.setdefault(id(lines), (lines, []))[1].append(held)
        elif isinstance(parameter.grad, DTensor):
            elsewhere.append(parameter.grad)
        elif parameter.grad is not None:
            squares.append(float(_square(parameter.grad)))
    for lines, helds in sharded.values():
        squares += _exchanged(helds, lines)
    squares += _summed(elsewhere)
    return torch.tensor(math.sqrt(math.fsum(squares)), dtype=torch.float64)


def clip_grad_norm_(
    parameters: nn.Module | Iterable[torch.Tensor], max_norm: float
) -> torch.Tensor:
    """Scales all gradients so that their common norm is at most `max_norm`; returns what it was.

    As `torch.nn.utils.clip_grad_norm_` for a model under `lz.shard_` at any stage, with the same
    result bit for bit at all of them; collective. A norm that is not finite clips nothing.
    """
    if not max_norm > 0:
        raise ConfigError(f"clip_grad_norm_: max_norm is {max_norm}; allowed is above 0")
    listed = _listed(parameters)
    norm = grad_norm(listed)
    if math.isfinite(float(norm)) and float(norm) > max_norm:
        gradients = [local(p.grad) for p in listed if p.grad is not None]
        torch._foreach_mul_(gradients, max_norm / (float(norm) + 1e-6))
    return norm


def _summed(gradients: list[DTensor]) -> list[float]:
    """Squares of gradients that LeZero does not hold, over all their shards; those that are split
    alike in one exchange."""
    alike: dict[tuple[DeviceMesh, tuple[int, ...]], list[torch.Tensor]] = {}
    for gradient in gradients:
        cuts = tuple(i for i, p in enumerate(gradient.placements) if isinstance(p, Shard))
        alike.setdefault((gradient.device_mesh, cuts), []).append(_square(gradient))
    found: list[float] = []
    for (mesh, cuts), mine in alike.items():
        squares = torch.stack(mine)
        for dim in cuts:
            with groups.naming_lost_ranks():
                dist.all_reduce(squares, group=mesh.get_group(dim))
        found += squares.tolist()
    return found


def _listed(parameters: nn.Module | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _exchanged(helds: list[Held], lines: Lines) -> list[float]:
    """Squares of every chunk of every gradient, from the ranks that have them."""
    split = lines.ranks > 1
    ranks, rank = (lines.ranks, lines.rank) if split else (groups.world_size(), groups.rank())
    mine = torch.stack([chunk_square(held, rank, ranks, split) for held in helds])
    if ranks == 1:
        return mine.tolist()
    every = [torch.empty_like(mine) for _ in range(ranks)]
    with groups.naming_lost_ranks():
        dist.all_gather(every, mine, group=lines.group)
    return torch.stack(every).flatten().tolist()


def chunk_square(held: Held, rank: int, ranks: int, split: bool) -> torch.Tensor:
    gradient = held.local_grad()
    if gradient is None or (not held.rows.shape and rank > 0):
        return torch.zeros((), dtype=torch.float64, device=held.sharded.device)
    if not split and held.rows.shape:
        first, last = Rows(held.rows.shape, ranks).range(rank)
        gradient = gradient[first:last]
    return _square(gradient)


def _square(gradient: torch.Tensor) -> torch.Tensor:
    """Sum of squares in fp64, by pieces: torch would first copy a large tensor to fp64."""
    flat = local(gradient).reshape(-1)
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in flat.split(_PIECE)]
    return torch.stack(norms).square().sum() if norms else flat.new_zeros((), dtype=torch.float64)
