"""A model built on meta gets its memory and values unit by unit; no rank ever holds it whole.

[Note: the same values everywhere]
Every module draws from a generator seeded with (seed, its path), on whole parameters, of which each
rank then keeps its rows. So the values do not depend on the number of ranks or on the stage. An
initialiser may draw from elsewhere (NumPy, `random`), so rank 0's values count, as in `shard_`.

[Note: what an initialiser forgets]
Memory is first filled with NaN, and what still has one was not set. Buffers of integers and of bool
know no NaN: one was not set if nobody has put another in its place, nor written to it in place, nor
changed a value of it (through `.data`, which counts no change).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from lezero.core import device
from lezero.core.errors import ConfigError, OrderError
from lezero.parallel.zero.held import Held
from lezero.parallel.zero.sharding import Sharding, sharding_of
from lezero.parallel.zero.share import share
from lezero.parallel.zero.unit import Unit

Model = TypeVar("Model", bound=nn.Module)
Init = Callable[[nn.Module], object]


def materialize_(model: Model, init: Init | None = None, *, seed: int = 0) -> Model:
    """Gives a sharded model on meta its memory and first values, in place; returns it.

    `init(module)` is called for every module, children first, as `Module.apply` does; by default
    each module's own `reset_parameters`. Rank 0's values count for all. Build the optimizer
    afterwards. Raises `OrderError` for a model that is not sharded or not on meta, `ConfigError`
    for a parameter or a buffer that got no value, and for a parameter that the initialiser of a
    module around its block changed.
    """
    sharding = sharding_of(model)
    if sharding is None:
        raise OrderError(
            "materialize_: the model is not sharded; apply lz.shard_ to it on meta first"
        )
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if not on_meta or not isinstance(sharding, Sharding):
        raise OrderError("materialize_: the model has its memory already; it is not on meta")
    paths = {id(module): path for path, module in model.named_modules()}
    with device.kept_generators(sharding.lines.place):
        for unit in sharding.units:
            unit.depth += 1  # an initialiser may call its modules, or read parametrized weights
            try:
                _materialize(unit, sharding, init or _reset, paths, seed)
            finally:
                unit.depth -= 1
    return model


def allocate_(model: Model) -> Model:
    """Gives a sharded model on meta its memory without values, for a loader to fill; returns it.

    Write every parameter with `sharding_of(model).write(name, rows)`. Buffers on meta become zeros.
    """
    sharding = sharding_of(model)
    if not isinstance(sharding, Sharding):
        raise OrderError("allocate_: the model is not sharded; apply lz.shard_ to it on meta first")
    for unit in sharding.units:
        for module in _modules(unit, sharding):
            for name, buffer in _meta_buffers(module):
                module._buffers[name] = torch.zeros_like(buffer, device=sharding.lines.place)
        for segment in unit.segments:
            if segment.helds[0].sharded.is_meta:
                segment.show_shards(segment.allocate(), sharding.lines.mesh)
        unit.changed()
    return model


@torch.no_grad()
def _materialize(
    unit: Unit, sharding: Sharding, init: Init, paths: dict[int, str], seed: int
) -> None:
    place = sharding.lines.place
    whole = {}
    for held in unit.helds:
        empty = torch.full(held.rows.shape, torch.nan, dtype=held.dtype, device=place)
        whole[held] = nn.Parameter(empty, requires_grad=held.sharded.requires_grad)
        held.show(whole[held])
    inner = _done_inside(unit, sharding)
    buffers = []
    for module in _modules(unit, sharding):
        buffers += [_Unset.put(module, name, place) for name, _ in _meta_buffers(module)]
        _seed(seed, paths[id(module)])
        init(module)
        _check_inside(inner, paths[id(module)])
    for module in _homes(unit, sharding):
        _seed(seed, f"{paths[id(module)]}, what it shares")
        with _out_of_reach(module, unit, sharding):
            init(module)
    for held in unit.helds:
        if whole[held].isnan().any():
            raise ConfigError(f"materialize_: parameter '{held.name}' got no value; {_REMEDY}")
    for buffer in buffers:
        if buffer.still:
            where = f"{paths[id(buffer.module)]}.{buffer.name}".lstrip(".")
            raise ConfigError(f"materialize_: buffer '{where}' got no value; {_REMEDY}")
    share((held.name, _value(held)) for held in unit.helds)
    for module in _modules(unit, sharding):
        share((f"{paths[id(module)]}.{name}", b) for name, b in module.named_buffers(recurse=False))
    for segment in unit.segments:
        rows = segment.allocate()
        for held, mine in zip(segment.helds, rows, strict=True):
            first, last = held.rows.range(segment.rank)
            data = _value(held)
            mine.copy_(data[first:last] if held.rows.shape else data)
        segment.show_shards(rows, sharding.lines.mesh)
    unit.changed()


_REMEDY = "give materialize_ an `init` that sets it, or give its module a `reset_parameters`"


def _value(held: Held) -> torch.Tensor:
    """What is registered under its name now."""
    module, attribute = held.places[0]
    found = module._parameters[attribute]
    assert found is not None
    return found.detach()


class _Unset(NamedTuple):
    """A buffer whose memory waits for values (Note [what an initialiser forgets])."""

    module: nn.Module
    name: str
    made: torch.Tensor
    version: int

    @classmethod
    def put(cls, module: nn.Module, name: str, place: torch.device) -> _Unset:
        meta = module._buffers[name]
        assert meta is not None
        filler = torch.nan if _has_nan(meta) else 0
        made = module._buffers[name] = torch.full_like(meta, filler, device=place)
        return cls(module, name, made, made._version)

    @property
    def still(self) -> bool:
        """Whether it has no value yet. One that holds nothing needs none."""
        now = self.module._buffers.get(self.name)
        if now is None or not now.numel():
            return False
        if _has_nan(now):
            return bool(now.isnan().any())
        return now is self.made and now._version == self.version and not now.any()


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _done_inside(unit: Unit, sharding: Sharding) -> dict[Held, tuple[int, int]]:
    """The parameters of blocks inside `unit`, which are split already, as they are now."""
    parts = {id(module) for module in unit.module.modules()}
    others = [u for u in sharding.units if u is not unit and id(u.module) in parts]
    helds = [held for other in others for held in other.helds if not held.sharded.is_meta]
    return {held: held.version() for held in helds}


def _check_inside(before: dict[Held, tuple[int, int]], path: str) -> None:
    """Raises `ConfigError` when one was changed: by rows each rank would draw the same values."""
    for held, version in before.items():
        if held.version() != version:
            raise ConfigError(
                f"materialize_: the initialiser of '{path or 'the model'}' changed parameter "
                f"'{held.name}' of a block inside it, which is split already; give materialize_ an "
                "`init` that sets what is in module.parameters(recurse=False)"
            )


def _modules(unit: Unit, sharding: Sharding) -> Iterator[nn.Module]:
    """The modules that belong to the unit and to no other, children first."""
    others = {id(other.module) for other in sharding.units if other is not unit}
    seen: set[int] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if id(child) not in others and id(child) not in seen:
                seen.add(id(child))
                yield from visit(child)
        yield module

    yield from visit(unit.module)


def _homes(unit: Unit, sharding: Sharding) -> list[nn.Module]:
    """A module for each parameter of `unit` that only modules of other units have: the weight that
    blocks share belongs to the root."""
    own = {id(module) for module in _modules(unit, sharding)}
    homes = [
        held.places[0][0]
        for held in unit.helds
        if not any(id(module) in own for module, _ in held.places)
    ]
    return list({id(module): module for module in homes}.values())


@contextlib.contextmanager
def _out_of_reach(module: nn.Module, unit: Unit, sharding: Sharding) -> Iterator[None]:
    """What `module` has of other units is without memory inside: it has its values already."""
    inside = {id(part) for part in module.modules()}
    others = [
        held
        for held in sharding.parameters.values()
        if held.segment.unit is not unit and any(id(home) in inside for home, _ in held.places)
    ]
    for held in others:
        empty = torch.empty(held.rows.shape, dtype=held.dtype, device="meta")
        held.show(nn.Parameter(empty, requires_grad=held.sharded.requires_grad))
    try:
        yield
    finally:
        for held in others:
            held.show(held.sharded)


def _meta_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(n, b) for n, b in module._buffers.items() if b is not None and b.is_meta]


def _reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            reset()
            return


def _seed(seed: int, path: str) -> None:
    digest = hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest) >> 1)
