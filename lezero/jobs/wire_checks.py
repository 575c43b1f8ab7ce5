"""Is every collective right? Each is held against a sum that this process makes alone.

All ranks' tensors come from seeds, so each rank knows what the others send. Sums must have the very
bits of a sum in rank order in fp32 (inside the hosts first with the hierarchical topology), with a
codec of what this process encodes and decodes alone in their place, and all ranks must hold the
same bits. That the codec itself is right is asked too: a sum of what it decodes must lie within its
bound of the sum without it, and so must what is gathered through it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from lezero.comm import Codec, Link, Mesh, Wire
from lezero.comm.codec import codec
from lezero.comm.flat import chunks
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
    sources = _sources(link, whole)
    mine = slice(link.rank * chunk, (link.rank + 1) * chunk)
    what = f"{str(dtype).removeprefix('torch.')}, {chunk} elements a rank"
    if link.wire.gather == "none":
        total, everywhere = _summed(link, sources)
        part = torch.zeros(chunk, dtype=torch.float32)
        link.reduce_scatter(whole[link.rank].clone(), part, key=f"rs {what}").wait()
        _near(found, f"reduce_scatter {what}", part, total[mine])
        if link.wire.codec != "none":
            bound = _slack(codec(link.wire.codec), sources, link.size)[mine]
            _near(found, f"reduce_scatter {what}", part, _in_order(sources)[mine], bound)
        flat = whole[link.rank].clone()
        link.all_reduce(flat, key=f"ar {what}").wait()
        _near(found, f"all_reduce {what}", flat, everywhere.to(dtype))
        _same(found, f"all_reduce {what}", flat)
    if link.wire.codec == "none":
        gathered = torch.zeros(chunk * link.size, dtype=dtype)
        link.all_gather(whole[link.rank][:chunk].clone(), gathered, key=f"ag {what}").wait()
        wanted = torch.cat([one[:chunk] for one in whole])
        allowed = None
        if link.wire.gather != "none":
            allowed = torch.cat([_bound(codec(link.wire.gather), x) for x in wanted.split(chunk)])
            allowed += wanted.double().abs() * _rounding(dtype)
        _near(found, f"all_gather {what}", gathered, wanted, allowed)
        _same(found, f"all_gather {what}", gathered)


def _tensor(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def _sources(link: Link, whole: list[torch.Tensor]) -> list[torch.Tensor]:
    """What is summed between ranks, in order: their tensors, or the sums of the hosts."""
    if link.topology != "hierarchical":
        return whole
    kept = torch.float32 if link.wire.codec != "none" else whole[0].dtype
    return [_in_order([whole[rank] for rank in host]).to(kept) for host in link.hosts]


def _summed(link: Link, sources: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp32 the sum as its owners have it, and as an all-reduce gives it to all."""
    if link.wire.codec == "none":
        total = _in_order(sources)
        return total, total
    used, local = codec(link.wire.codec), link.size // len(sources)
    owned, given = [], []
    for place, parts in enumerate(zip(*(chunks(x, link.size) for x in sources), strict=True)):
        total = torch.zeros(len(parts[0]), dtype=torch.float32)
        for number, part in enumerate(parts):
            if number == place // local:  # an owner does not encode for itself
                total += part
            else:
                used.decode(_encoded(used, part), total, add=True)
        owned.append(total)
        given.append(torch.empty_like(total))
        used.decode(_encoded(used, total), given[-1])
    return torch.cat(owned), torch.cat(given)


def _encoded(used: Codec, values: torch.Tensor) -> torch.Tensor:
    """As a link with feedback does it the first time."""
    payload = torch.empty(used.bytes(len(values)), dtype=torch.uint8)
    used.encode(values, payload, torch.zeros(len(values), dtype=torch.float32))
    return payload


def _slack(used: Codec, sources: list[torch.Tensor], ranks: int) -> torch.Tensor:
    """How far a sum of what `used` decodes of each source may be from theirs."""
    slack = torch.zeros(len(sources[0]), dtype=torch.float64)
    for one in sources:
        slack += torch.cat([_bound(used, part) for part in chunks(one, ranks)])
        slack += one.double().abs() * 2**-22
    return slack


def _in_order(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Their sum, one after the other, in fp32."""
    total = tensors[0].float()
    for one in tensors[1:]:
        total = total + one.float()
    return total


def _bound(one: Codec, values: torch.Tensor) -> torch.Tensor:
    return one.bound(values.float()).double()


def _rounding(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def _near(
    found: Check,
    what: str,
    got: torch.Tensor,
    wanted: torch.Tensor,
    allowed: torch.Tensor | None = None,
) -> None:
    """Without `allowed` they must be equal."""
    found.compared += 1
    off = (got.double() - wanted.double()).abs()
    allowed = torch.zeros_like(off) if allowed is None else allowed
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
