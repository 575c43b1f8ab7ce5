"""The norm of all gradients, the same bits at every stage, and clipping by it.

[Note: a fixed partition]
The norm of a sum depends on how the sum is cut. So the cut is always by parameter and by the rows
that stage 3 would give each rank, partial sums of squares are taken in fp64, and their total is
exact (`math.fsum`), whatever order they come in. Of another norm than the 2-norm those of the same
parts are combined, in the order of parameters and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lezero.core import groups, in_flight
from lezero.core.device import with_doubles
from lezero.core.errors import ConfigError
from lezero.ops.square_sum import square_sums
from lezero.parallel.zero.held import HELD, Held, local
from lezero.parallel.zero.layout import Rows
from lezero.parallel.zero.lines import Lines

_PIECE = 1 << 18
_LABEL = "gradient norm"


@torch.no_grad()
def grad_norm(
    parameters: nn.Module | Iterable[torch.Tensor], norm_type: float = 2.0
) -> torch.Tensor:
    """The norm of all gradients, fp64, on every rank. Collective where the model is sharded.

    `norm_type`: the p of the p-norm, above 0; `inf` is the largest magnitude. Parameters without a
    gradient do not count. Plain parameters count on each rank by themselves.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ConfigError(f"gradient norm: norm_type is {norm_type}; allowed is above 0, or inf")
    listed = _listed(parameters)
    sharded: dict[int, tuple[Lines, list[Held]]] = {}
    elsewhere: list[DTensor] = []  # FSDP2's
    plain: list[torch.Tensor] = []
    for parameter in listed:
        held: Held | None = getattr(parameter, HELD, None)
        if held is not None:
            lines = held.segment.unit.sharding.lines
            sharded.setdefault(id(lines), (lines, []))[1].append(held)
        elif isinstance(parameter.grad, DTensor):
            elsewhere.append(parameter.grad)
        elif parameter.grad is not None:
            plain.append(parameter.grad)
    found = _parts(plain, plain[0].device, norm_type).tolist() if plain else []
    for lines, helds in sharded.values():
        found += _exchanged(helds, lines, norm_type)
    found += _summed(elsewhere, norm_type)
    if norm_type == 2:
        return torch.tensor(root_of_sum(found), dtype=torch.float64)
    return torch.linalg.vector_norm(torch.tensor([0.0, *found], dtype=torch.float64), norm_type)


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scales all gradients so that their common norm is at most `max_norm`; returns what it was.

    As `torch.nn.utils.clip_grad_norm_` for a model under `lz.shard_` at any stage, with the same
    result bit for bit at all of them; collective. `norm_type`: the p of the p-norm, above 0; `inf`
    is the largest magnitude. A norm that is not finite clips nothing. `ConfigError` where some of
    the parameters are of no sharded model: their gradients, and so the norm, are each rank's own.
    """
    if not max_norm > 0:
        raise ConfigError(f"clip_grad_norm_: max_norm is {max_norm}; allowed is above 0")
    listed = _listed(parameters)
    _need_shared(listed)
    norm = grad_norm(listed, norm_type)
    if math.isfinite(float(norm)) and float(norm) > max_norm:
        gradients = [local(p.grad) for p in listed if p.grad is not None]
        torch._foreach_mul_(gradients, max_norm / (float(norm) + 1e-6))
    return norm


def _need_shared(parameters: list[torch.Tensor]) -> None:
    given = [p for p in parameters if p.grad is not None]
    alone = [p for p in given if not hasattr(p, HELD) and not isinstance(p.grad, DTensor)]
    if alone and len(alone) < len(given) and groups.world_size() > 1:
        raise ConfigError(
            f"clip_grad_norm_: {len(alone)} of {len(given)} parameters are of no sharded model, "
            f"one of shape {tuple(alone[0].shape)}: each rank would clip its shards by a norm of "
            "its own. Shard the whole of what is trained, or clip the others by themselves"
        )


def _summed(gradients: list[DTensor], norm_type: float) -> list[float]:
    """Parts (`_parts`) of gradients that LeZero does not hold, over all their shards; those that
    are split alike in one exchange."""
    alike: dict[tuple[DeviceMesh, tuple[int, ...]], list[DTensor]] = {}
    for gradient in gradients:
        cuts = tuple(i for i, p in enumerate(gradient.placements) if isinstance(p, Shard))
        alike.setdefault((gradient.device_mesh, cuts), []).append(gradient)
    found: list[float] = []
    for (mesh, cuts), mine in alike.items():
        total, op = _parts(mine, mine[0].device, norm_type), dist.ReduceOp.SUM
        powers = norm_type != 2 and not math.isinf(norm_type)
        if powers:
            total = total.pow(norm_type)
        elif math.isinf(norm_type):
            op = dist.ReduceOp.MAX
        for dim in cuts:
            with groups.watched("all_reduce", total.shape, total.dtype, _LABEL):
                dist.all_reduce(total, op, group=mesh.get_group(dim))
        found += (total.pow(1 / norm_type) if powers else total).tolist()
    return found


def _listed(parameters: nn.Module | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _exchanged(helds: list[Held], lines: Lines, norm_type: float) -> list[float]:
    """Parts (`_parts`) of every chunk of every gradient, from the ranks that have them."""
    split = lines.ranks > 1
    ranks, rank = (lines.ranks, lines.rank) if split else (groups.world_size(), groups.rank())
    chunks = [chunk(held, rank, ranks, split) for held in helds]
    mine = _parts(chunks, lines.place, norm_type)
    if ranks == 1:
        return mine.tolist()
    every = [torch.empty_like(mine) for _ in range(ranks)]
    with groups.watched("all_gather", mine.shape, mine.dtype, _LABEL):
        in_flight.wait(dist.all_gather(every, mine, group=lines.group, async_op=True))
    return torch.stack(every).flatten().tolist()


def chunk(held: Held, rank: int, ranks: int, split: bool) -> torch.Tensor | None:
    """The part of a gradient that this rank counts."""
    gradient = held.local_grad()
    if gradient is None or (not held.rows.shape and rank > 0):
        return None
    if not split and held.rows.shape:
        first, last = Rows(held.rows.shape, ranks).range(rank)
        gradient = gradient[first:last]
    return gradient


def _parts(
    tensors: Sequence[torch.Tensor | None], place: torch.device, norm_type: float
) -> torch.Tensor:
    """What the norm is made of: the sum of squares of each for the 2-norm, for others their norms,
    in fp64; 0 for None."""
    if norm_type == 2:
        return squares(tensors, place)
    nothing = torch.zeros((), dtype=torch.float64, device=place)
    return torch.stack([nothing if x is None else _norm(x, norm_type) for x in tensors])


def root_of_sum(squares: Sequence[float]) -> float:
    """The root of their exact sum; infinite where that is beyond fp64."""
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf


def squares(tensors: Sequence[torch.Tensor | None], place: torch.device) -> torch.Tensor:
    """The sum of squares of each in fp64; 0 for None."""
    if place.type != "cpu":
        return at_once(tensors, place)
    found = torch.zeros(len(tensors), dtype=torch.float64, device=place)
    there = [i for i, x in enumerate(tensors) if x is not None]
    found[there] = square_sums([_real(local(x)) for x in tensors if x is not None])
    return found


def at_once(tensors: Sequence[torch.Tensor | None], place: torch.device) -> torch.Tensor:
    """`squares` in a few kernels, where the launch of each costs more than its work."""
    wide = torch.float32 if place.type == "mps" else torch.float64  # which has none of 64 bits
    nothing = torch.zeros((), dtype=wide, device=place)
    mine = [nothing if x is None else _real(local(x)) for x in tensors]
    there = [x for x in mine if x.numel() and x is not nothing]
    norms = iter(torch._foreach_norm(there, 2, dtype=wide) if there else ())
    found = [next(norms) if x.numel() and x is not nothing else nothing for x in mine]
    return with_doubles(torch.stack(found)).double().square()


def _real(x: torch.Tensor) -> torch.Tensor:
    """Of complex numbers both parts, whose squares add up to those of their magnitudes."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _norm(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm in fp64, by pieces."""
    flat = local(gradient).reshape(-1)
    wide = torch.complex128 if flat.is_complex() else torch.float64
    norms = [
        torch.linalg.vector_norm(piece, norm_type, dtype=wide)
        for piece in flat.split(_PIECE)
        if piece.numel()
    ]
    if not norms:
        return flat.new_zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)
