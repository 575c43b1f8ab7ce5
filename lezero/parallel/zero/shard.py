"""The verb: `lz.shard_(model, lz.Zero(stage=2))`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from lezero import __version__
from lezero.comm.mesh import Mesh
from lezero.comm.wire import Wire
from lezero.core import device, groups, ledger
from lezero.core.errors import ConfigError, OrderError
from lezero.memory.pool import give_back_free_blocks
from lezero.nn.blocks import blocks
from lezero.parallel.zero import checks, fsdp, guard
from lezero.parallel.zero.agreement import agree, agree_on_errors
from lezero.parallel.zero.call import announce
from lezero.parallel.zero.config import Zero
from lezero.parallel.zero.held import Held
from lezero.parallel.zero.layout import SOLO, Rows
from lezero.parallel.zero.lines import Lines, arrange
from lezero.parallel.zero.segment import Segment
from lezero.parallel.zero.sharding import SHARDING, Sharding, sharding_of
from lezero.parallel.zero.share import share
from lezero.parallel.zero.unit import Unit
from lezero.parallel.zero.whole import take_whole_values

Model = TypeVar("Model", bound=nn.Module)


def shard_(
    model: Model, config: Zero | None = None, *, wire: Wire | None = None, mesh: Mesh | None = None
) -> Model:
    """Splits the training state of `model` over the ranks, in place; returns the model.

    Call it on every rank, before the optimizer is built and after everything that changes modules.
    From then on `loss.backward()` leaves the mean gradient over the ranks in `p.grad`, and at
    stages 1 to 3 the parameters are DTensors, split by rows (names stay). Rank 0's values count for
    all. A model on meta stays there until `materialize_`. `mesh` may have the axes "replicate" and
    "shard", in this order; by default all ranks split one copy (stage 0: all replicate).
    docs/zero.md has what each stage keeps and costs.

    Raises on every rank: `ConfigError` for a mesh or parameters that cannot be split, `OrderError`
    for a model that is sharded already and in a process that a launcher made one of several and
    that has not joined them, `DistributedError` when ranks differ in version, model or
    configuration (naming what differs).
    """
    groups.need_joined()
    config, wire = Zero() if config is None else config, Wire() if wire is None else wire
    problem: ConfigError | OrderError | None = None
    try:
        checks.check_kinds(model=model, config=config, wire=wire, mesh=mesh)
        checks.check_model(model)
        checks.check_max_norm(model, config)
    except (ConfigError, OrderError) as error:
        problem = error
    agree_on_errors("lz.shard_", problem)
    agree("lz.shard_", _description(config, wire, mesh))
    checks.agree_on_tensors(model)
    place = _place(model)
    arranged = arrange(config.stage, mesh, place.type)
    share((*model.named_parameters(), *model.named_buffers()))
    if fsdp.fits(model, config, wire, arranged, place):
        model.__dict__[SHARDING] = fsdp.apply(model, config, arranged)
    else:
        _shard_with_units(model, config, Lines(arranged, wire, place))
    take_whole_values(model, sharding_of(model))
    ledger.record(model, "shard_")
    guard.register()
    return model


def _shard_with_units(model: nn.Module, config: Zero, lines: Lines) -> None:
    units = _units(model, config, lines)
    try:
        checks.check_wires(units, lines)
    except ConfigError:
        lines.close()
        raise
    sharding = Sharding(config, lines, units)
    _split(model, sharding)
    roots = {id(module) for held in sharding.root.helds for module, _ in held.places}
    for unit in sharding.units:
        if unit is not sharding.root:
            unit.shares = any(id(part) in roots for part in unit.module.modules())
        announce(unit.module, unit)
    for module in list(_parts(sharding.root, sharding)):
        announce(module, sharding.root)
    model.__dict__[SHARDING] = sharding


def _parts(root: Unit, sharding: Sharding) -> Iterator[nn.Module]:
    """Modules outside of blocks that have parameters of the root: they can be called alone too."""
    blocks = {
        id(part) for unit in sharding.units if unit is not root for part in unit.module.modules()
    }
    own = {id(module) for held in root.helds for module, _ in held.places} - blocks
    for module in root.module.modules():
        callable_ = type(module).forward is not nn.Module.forward
        inside = any(id(part) in own for part in module.modules())
        if module is not root.module and id(module) not in blocks and inside and callable_:
            yield module


def _description(config: Zero, wire: Wire, mesh: Mesh | None) -> dict[str, object]:
    """What all ranks must have alike, in plain data."""
    return {
        "lezero version": __version__,
        "torch version": torch.__version__.split("+")[0],
        **{f"zero.{key}": value for key, value in config.to_dict().items()},
        **{f"wire.{key}": value for key, value in wire.to_dict().items()},
        "mesh": list(mesh.axes.items()) if mesh is not None else None,
    }


def _place(model: nn.Module) -> torch.device:
    """Where the model computes: its own device, or this rank's for a model on meta."""
    found = next(model.parameters()).device
    return device.device() if found.type == "meta" else found


def _units(model: nn.Module, config: Zero, lines: Lines) -> list[Unit]:
    """The blocks in order, then the root, with their parameters in segments."""
    found = [(name, module, {id(p) for p in module.parameters()}) for name, module in blocks(model)]
    owners: dict[int, list[int]] = defaultdict(list)
    for index, (_, _, ids) in enumerate(found):
        for parameter in ids:
            owners[parameter].append(index)
    groups_of: list[list[Held]] = [[] for _ in range(len(found) + 1)]
    for held in _helds(model, lines.ranks):
        inside = owners[id(held.sharded)]
        everywhere = len(inside) == 1 and all(
            any(module is part for part in found[inside[0]][1].modules())
            for module, _ in held.places
        )
        groups_of[inside[0] if everywhere else -1].append(held)
    units: list[Unit] = []
    turns: dict[object, int] = defaultdict(int)
    for (name, module), helds in zip(
        [*((n, m) for n, m, _ in found), ("", model)], groups_of, strict=True
    ):
        segments = _segments(helds, config, lines)
        unit = Unit(name, module, segments, 0)
        unit.index = turns[unit.signature]
        turns[unit.signature] += 1
        if helds or module is model:
            units.append(unit)
    return units


def _helds(model: nn.Module, ranks: int) -> list[Held]:
    names: dict[int, list[str]] = defaultdict(list)
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    tensors: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                tensors[id(parameter)] = parameter
                names[id(parameter)].append(f"{path}.{attribute}" if path else attribute)
                if (module, attribute) not in places[id(parameter)]:
                    places[id(parameter)].append((module, attribute))
    return [
        Held(
            name=names[key][0],
            names=tuple(names[key]),
            places=tuple(places[key]),
            rows=Rows(tuple(parameter.shape), ranks),
            dtype=parameter.dtype,
            sharded=parameter,
            index=index,
        )
        for index, (key, parameter) in enumerate(tensors.items())
    ]


def _segments(helds: list[Held], config: Zero, lines: Lines) -> list[Segment]:
    """Large parameters alone, small ones of one kind together; in the order of their first."""
    packs: dict[object, list[Held]] = defaultdict(list)
    for held in helds:
        solo = held.rows.numel >= SOLO
        kind = (held.dtype, _compute(held, config), held.sharded.requires_grad)
        packs[held.name if solo else kind].append(held)
    lasting = config.stage < 3
    return [Segment(p, _compute(p[0], config), lines, lasting=lasting) for p in packs.values()]


def _compute(held: Held, config: Zero) -> torch.dtype:
    """Batch norms take 16-bit inputs, but compute with the type of their running statistics."""
    if any(isinstance(module, fsdp.BATCH_NORMS) for module, _ in held.places):
        return held.dtype
    return config.compute_dtype(held.dtype)


@torch.no_grad()
def _split(model: nn.Module, sharding: Sharding) -> None:
    """Replaces the parameters by their shards, one at a time, so that memory does not double."""
    slots: dict[object, list[object]] = defaultdict(list)
    meta = next(model.parameters()).is_meta
    for unit in sharding.units:
        if sharding.stage == 3 and not all(segment.alias for segment in unit.segments):
            unit.slots = slots[unit.signature]  # type: ignore[assignment]
        for segment in unit.segments:
            if meta:
                segment.show_on_meta(sharding.lines.mesh)
                continue
            rows = segment.allocate()
            if segment.link is not None:
                for held, mine in zip(segment.helds, rows, strict=True):
                    first, last = held.rows.range(segment.rank)
                    whole = held.sharded.detach()
                    mine.copy_(whole[first:last] if held.rows.shape else whole)
            segment.show_shards(rows, sharding.lines.mesh)
        unit.changed()
    if sharding.lines.place.type == "cpu":
        give_back_free_blocks()  # the whole parameters'
