"""What a sharded run exchanges, as the proof sees it: whole tensors, and what a lossy wire owes.

[Note: a lossy wire]
A codec changes gradients on purpose, so they cannot be held to rounding. With feedback they still
can: what arrived in a step, plus what is owed after it, minus what was owed before, is what was to
be sent, whatever the codec. Only the storage of the errors rounds (`STORED`). Without feedback the
plain gradients go through the codec in the wire's own layout, and the run may lose `LOSS_SLACK`
times as much: its ranks encode gradients of their own, which are longer than their mean.
Parameters that are gathered through a codec, or computed in bf16, are taken as the codec leaves
them, exactly, on both sides. FSDP2 moves everything as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from lezero.comm.codec import Codec, codec
from lezero.comm.link import Link
from lezero.comm.whole import whole as gathered
from lezero.core import groups
from lezero.parallel.zero import Sharding, full_parameters, sharding_of
from lezero.parallel.zero.fsdp import FsdpSharding
from lezero.parallel.zero.segment import Segment

STORED = {"fp32": 1e-5, "bf16": 2.0**-7, "int8": 1 / 127}
"""Share of the errors that storing them in a type may lose; in int8 of the largest one."""
LOSS_SLACK = 4.0
AnySharding = Sharding | FsdpSharding


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole; on every rank together where the model is sharded."""
    return {name: value.detach() for name, value in full_parameters(model)}


def whole_gradients(model: nn.Module, place: torch.device) -> dict[str, Tensor]:
    """Copies of all gradients, whole, at `place` on rank 0; empty elsewhere. As `whole`."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            value = gathered(parameter.grad.detach(), f"gradient of {name}")
            if groups.is_main():
                found[name] = value.to(place, copy=True)
    return found


def links(sharding: AnySharding | None) -> list[Link]:
    """The wires of a sharded model; none where FSDP2 or nobody splits it."""
    if not isinstance(sharding, Sharding):
        return []
    return [link for link in (sharding.lines.shard, sharding.lines.replicate) if link is not None]


def as_computed(sharding: AnySharding | None, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters as forward and backward see them: rounded to what they compute in, and through the
    codec of the gather. `named`: whole fp32 parameters."""
    if sharding is None:
        return dict(named)
    if isinstance(sharding, FsdpSharding):
        compute = sharding.config.compute_dtype
        return {
            name: value.to(compute(value.dtype)).to(value.dtype) for name, value in named.items()
        }
    gather = sharding.lines.wire.gather
    used = None if gather == "none" or sharding.lines.shard is None else codec(gather)
    found = dict(named)
    for segment in _segments(sharding):
        values = _through(used, segment, named, segment.compute, segment.ranks)
        found |= {name: value.to(named[name].dtype) for name, value in values.items()}
    return found


def encoding_loss(
    sharding: AnySharding | None, gradients: Mapping[str, Tensor]
) -> dict[str, float]:
    """What a codec without feedback loses of each of the plain `gradients`, as a norm."""
    found: dict[str, float] = {}
    for link in links(sharding):
        assert isinstance(sharding, Sharding)
        if link.codec == "none" or link.feedback is not None:
            continue
        for segment in _segments(sharding):
            through = _through(codec(link.codec), segment, gradients, torch.float32, link.size)
            for name, value in through.items():
                lost = torch.linalg.vector_norm(value - gradients[name], dtype=torch.float64)
                found[name] = found.get(name, 0.0) + float(lost)
    return found


def owed(model: nn.Module) -> dict[str, Tensor]:
    """What feedback has kept of each gradient, as the mean over ranks, flat, fp64; every rank calls
    it together. Empty without feedback."""
    sharding = sharding_of(model)
    kept = [link.feedback for link in links(sharding) if link.feedback is not None]
    if sharding is None or not kept:
        return {}
    found = {
        name: torch.zeros(held.rows.numel, dtype=torch.float64)
        for name, held in sharding.parameters.items()
    }
    for feedback in kept:
        for key, data in feedback.state_dict().items():
            name, start = key.split("/", 1)[1].rsplit("/", 1)
            part = found[name][int(start) : int(start) + data.numel()]
            part += data[: part.numel()].double().cpu()  # each rank has one without dims
    for name, total in found.items():
        found[name] = groups.all_reduce_sum(total, f"errors of {name}") / groups.world_size()
    return found


def _segments(sharding: Sharding) -> Iterator[Segment]:
    for unit in sharding.units:
        yield from unit.segments


def _through(
    used: Codec | None,
    segment: Segment,
    named: Mapping[str, Tensor],
    dtype: torch.dtype,
    parts: int,
) -> dict[str, Tensor]:
    """The segment's parameters in `dtype`, encoded and decoded in `parts` equal chunks."""
    layout = segment.layout
    length = -(-layout.numel // parts) * parts
    flat = torch.zeros(length, dtype=dtype)
    there = [place for place in layout.places if place.name in named]
    for place in there:
        for inside, outside in layout.pieces(flat, place, named[place.name].cpu()):
            inside.copy_(outside)
    if used is not None:
        _round_trip(used, flat.chunk(parts))
    found = {}
    for place in there:
        value = torch.empty_like(named[place.name], dtype=dtype, device="cpu")
        for inside, outside in layout.pieces(flat, place, value):
            if place.rows.shape:
                outside.copy_(inside)
            else:
                value.copy_(inside[0])
        found[place.name] = value.to(named[place.name].device)
    return found


def _round_trip(used: Codec, chunks: Iterable[Tensor]) -> None:
    for chunk in chunks:
        payload = torch.empty(used.bytes(chunk.numel()), dtype=torch.uint8)
        used.encode(chunk, payload)
        used.decode(payload, chunk)
