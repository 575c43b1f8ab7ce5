"""Is every collective right? Each is held against a sum that this process makes alone.

All ranks' tensors come from seeds, so each rank knows what the others send. Without a codec the
result must have the very bits of a sum in rank order in fp32 (inside the hosts first with the
hierarchical topology). With a codec it must lie within the codec's bound of that sum, and all ranks
must hold the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from lezero.comm import Codec, Link, Mesh, Wire
from lezero.comm.codec import codec
from lezero.core import groups
from lezero.core.errors import DistributedError, LeZeroError

CHUNKS = (1, 333, 70_001)
"""Elements of a chunk: the least, a few, and more than a block of anything."""
GATHERED = ("fp16", "bf16", "int8", "int4")
CODED = (*GATHERED, "2:4-bf16", "2:4-int8", "2:4-int4", "sign", "topk:0.01")


@dataclass
class Check:
    """One wire: how many results were compared, and what was wrong, rank by rank."""

    name: str
    topology: str
    compared: int = 0
    wrong: list[str] = field(default_factory=list)


def wires(topologies: tuple[str, ...]) -> Iterator[tuple[str, Wire]]:
    """Every kind of wire that these topologies allow, each with a name for people."""
    for topology in topologies:
        yield "as they are", Wire.parse({"topology": topology})
        if topology == "shared":
            continue
        for name in CODED:
            feedback = "both"
            yield name, Wire.parse({"topology": topology, "codec": name, "feedback": feedback})
        for name in GATHERED:
            yield f"gather {name}", Wire.parse({"topology": topology, "gather": name})


def check(mesh: Mesh, axis: str, name: str, wire: Wire) -> Check:
    """Tries one wire on every rank; the findings of all ranks, the same on each."""
    mine = Check(name, wire.topology)
    try:
        with Link(wire, mesh, axis) as link:
            for chunk in CHUNKS:
                for dtype in (torch.float32, torch.bfloat16):
                    _all(link, mine, chunk, dtype)
    except DistributedError:
        raise  # a rank is gone: nothing more can be tried
    except LeZeroError as error:
        mine.wrong.append(str(error))
    found = Check(name, wire.topology, sum(groups.gather_objects(mine.compared)))
    every = groups.gather_objects(mine.wrong)
    found.wrong = [f"rank {rank}: {text}" for rank, texts in enumerate(every) for text in texts]
    return found


def _all(link: Link, found: Check, chunk: int, dtype: torch.dtype) -> None:
    whole = [_tensor(rank, chunk * link.size, dtype) for rank in range(link.size)]
    total, slack = _summed(link, whole)
    mine = slice(link.rank * chunk, (link.rank + 1) * chunk)
    what = f"{str(dtype).removeprefix('torch.')}, {chunk} elements a rank"
    if link.wire.gather == "none":
        part = torch.zeros(chunk)
        link.reduce_scatter(whole[link.rank].clone(), part, key=f"rs {what}").wait()
        _near(found, f"reduce_scatter {what}", part, total[mine], slack[mine])
        flat = whole[link.rank].clone()
        link.all_reduce(flat, key=f"ar {what}").wait()
        _near(found, f"all_reduce {what}", flat, total.to(dtype), _twice(link, total, slack, dtype))
        _same(found, f"all_reduce {what}", flat)
    if link.wire.codec == "none":
        gathered = torch.zeros(chunk * link.size, dtype=dtype)
        link.all_gather(whole[link.rank][:chunk].clone(), gathered, key=f"ag {what}").wait()
        wanted = torch.cat([one[:chunk] for one in whole])
        allowed = torch.zeros(len(wanted), dtype=torch.float64)
        if link.wire.gather != "none":
            allowed = torch.cat([_bound(codec(link.wire.gather), x) for x in wanted.split(chunk)])
            allowed += wanted.double().abs() * _rounding(dtype)
        _near(found, f"all_gather {what}", gathered, wanted, allowed)
        _same(found, f"all_gather {what}", gathered)


def _tensor(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def _summed(link: Link, whole: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum in rank order in fp32, and how far from it each element may be."""
    sources = whole
    coded = link.wire.codec != "none"
    if link.topology == "hierarchical":
        kept = torch.float32 if coded else whole[0].dtype
        sources = [_in_order([whole[rank] for rank in host]).to(kept) for host in link.hosts]
    total = _in_order(sources)
    slack = torch.zeros(len(total), dtype=torch.float64)
    if coded:
        one_codec, chunk = codec(link.wire.codec), len(total) // link.size
        for one in sources:
            slack += torch.cat([_bound(one_codec, part) for part in one.split(chunk)])
            slack += one.double().abs() * 2**-22
    return total, slack


def _in_order(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Their sum, one after the other, in fp32."""
    total = tensors[0].float()
    for one in tensors[1:]:
        total = total + one.float()
    return total


def _twice(
    link: Link, total: torch.Tensor, slack: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """What an all-reduce may miss: the sum is rounded, and with a codec encoded once more."""
    allowed = slack.clone()
    if link.wire.codec != "none":
        largest = total.double().abs() + slack
        chunk = len(total) // link.size
        parts = largest.split(chunk)
        allowed += torch.cat([torch.full_like(part, float(part.max())) for part in parts])
    if bool(slack.any()):
        allowed += total.double().abs() * _rounding(dtype) * 2
    return allowed


def _bound(one: Codec, values: torch.Tensor) -> torch.Tensor:
    return one.bound(values.float()).double()


def _rounding(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def _near(
    found: Check, what: str, got: torch.Tensor, wanted: torch.Tensor, allowed: torch.Tensor
) -> None:
    found.compared += 1
    off = (got.double() - wanted.double()).abs()
    bad = ~(off <= allowed)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        found.wrong.append(
            f"{what}: element {at} is {float(got[at]):g}, not {float(wanted[at]):g} "
            f"(allowed difference {float(allowed[at]):.3g}; {int(bad.sum())} elements are off)"
        )


def _same(found: Check, what: str, got: torch.Tensor) -> None:
    digest = hashlib.sha256(got.view(torch.uint8).numpy().tobytes()).hexdigest()
    every = groups.gather_objects(digest)
    found.compared += 1
    if len(set(every)) > 1:
        found.wrong.append(f"{what}: ranks end with different bits")
