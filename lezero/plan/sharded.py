"""ZeRO on fake tensors: the real units, slots and gradient buffers, on links that move nothing.

`lezero.parallel.zero` itself splits the model and runs; only its links are replaced, by ones that
take the buffers which the real ones take and note what would travel. So what the forecast counts is
what that package allocates and computes, not a formula about it.

[Note: pages that ranks share]
A buffer of the topology "shared" is mapped by every rank of the host. A page counts once over its
sharers (PSS, as Linux has it): ranks hold equal buffers, so what a rank counts is what it makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lezero.comm.account import Account
from lezero.comm.buffers import Buffers
from lezero.comm.choice import Exchange
from lezero.comm.codec import Codec, codec
from lezero.comm.link import TYPES, Link
from lezero.comm.pending import Pending
from lezero.comm.route import Span
from lezero.comm.spans import joined, scattered
from lezero.comm.wire import AUTO
from lezero.core.errors import ConfigError
from lezero.parallel.zero import Zero, guard
from lezero.parallel.zero import shard as splitting
from lezero.parallel.zero.backward import Backward
from lezero.parallel.zero.call import announce
from lezero.parallel.zero.gradients import Bucket
from lezero.parallel.zero.held import Held, local
from lezero.parallel.zero.lines import Lines
from lezero.parallel.zero.norm import chunk, squares
from lezero.parallel.zero.sharding import SHARDING, Sharding

if TYPE_CHECKING:
    from lezero.plan.spec import StepSpec

_FEEDBACK = {"fp32": torch.float32, "bf16": torch.bfloat16}
Count = Callable[[torch.Tensor, str], None]
"""Told of every tensor that sharding keeps, and what it is for."""


def topology(spec: StepSpec) -> str:
    """The way that the wire of `spec` would take: as `comm/routing.py` chooses."""
    asked = spec.wire.topology
    if asked != "auto":
        return asked
    gathers = spec.zero is not None and spec.zero.stage > 0 and spec.wire.gather != "none"
    encoded = spec.wire.codec not in ("none", AUTO) or gathers
    if spec.device != "cpu":
        return "flat"
    if spec.neighbours == spec.ranks:
        return "flat" if encoded else "shared"
    regular = spec.neighbours > 1 and spec.ranks % spec.neighbours == 0
    return "hierarchical" if regular else "flat"


def hosts(spec: StepSpec) -> int:
    """How many machines the ranks are on."""
    return -(-spec.ranks // spec.neighbours)


class Done(Pending):
    """A collective that moves nothing; when it is waited for, its buffers are free again."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def poll(self) -> bool:
        self.wait()
        return True


class StillLink(Link):
    """Takes the buffers of a real link of `size` ranks and counts `traffic`; sends nothing."""

    def __init__(self, spec: StepSpec, size: int, count: Count) -> None:
        self.wire, self.size, self.rank = spec.wire, size, 0
        self.topology = topology(spec)
        self.account, self.chooser = Account(), None
        self.traffic: Counter[Exchange] = Counter()
        wire = spec.wire
        self._encoder = codec(wire.codec) if wire.codec not in ("none", AUTO) else None
        self._gather = codec(wire.gather) if wire.gather != "none" else None
        self._buffers, self._count = Buffers(torch.device(spec.device)), count
        self._errors: dict[tuple[str, str], torch.Tensor] = {}
        self.saved_bytes = 0
        """Of errors, what a save takes in host memory: its copy, and what is decoded or joined."""
        self._scratch: torch.Tensor | None = None

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def step_done(self) -> None:
        pass

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        out: torch.Tensor,
        *,
        key: str,
        spans: Sequence[Span] | None = None,
    ) -> Pending:
        return self._reduce("reduce_scatter", flat, out, key, spans)

    def all_reduce(
        self, flat: torch.Tensor, *, key: str, spans: Sequence[Span] | None = None
    ) -> Pending:
        self._keep_error("server", key, flat.numel() // self.size)
        return self._reduce("all_reduce", flat, flat[: flat.numel() // self.size], key, spans)

    def all_gather(self, shard: torch.Tensor, out: torch.Tensor, *, key: str) -> Pending:
        self.traffic[Exchange("all_gather", out.numel(), out.element_size())] += 1
        taken = []
        if self._gather is not None:
            size = self._gather.bytes(shard.numel())
            taken = [self._take(size), self._take(self.size * size)]
        elif shard.untyped_storage()._cdata != out.untyped_storage()._cdata:
            out[: shard.numel()].copy_(shard)  # its own part, which is not in its place
        return Done(lambda: self._buffers.give(*taken))

    def _reduce(
        self,
        what: str,
        flat: torch.Tensor,
        out: torch.Tensor,
        key: str,
        spans: Sequence[Span] | None,
    ) -> Pending:
        self.traffic[Exchange(what, flat.numel(), flat.element_size())] += 1
        chunk, taken = flat.numel() // self.size, []
        if self._encoder is not None:
            size = self.size * self._encoder.bytes(chunk)
            taken = [self._take(size), self._take(size)]
            if out.dtype != torch.float32 or what == "all_reduce":
                taken.append(self._take(chunk, torch.float32))
            self._keep_error("worker", key, flat.numel(), spans)
        elif self.topology != "shared":
            taken = [self._take(flat.numel(), flat.dtype)]
        return Done(lambda: self._buffers.give(*taken))

    def _take(self, numel: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return self._buffers.take(numel, dtype)

    def _keep_error(
        self, side: str, key: str, numel: int, spans: Sequence[Span] | None = None
    ) -> None:
        """What feedback keeps of a buffer, from its first use on."""
        wire = self.wire
        wanted = ("worker", "server") if wire.feedback == "both" else (wire.feedback,)
        if self._encoder is None or side not in wanted or (side, key) in self._errors:
            return
        dtype = _FEEDBACK.get(wire.feedback_dtype)
        if dtype is None:
            error = torch.empty(codec("int8").bytes(numel), dtype=torch.uint8)
            if self._scratch is None or self._scratch.numel() < numel:  # to decode into
                self._scratch = torch.empty(numel, dtype=torch.float32)
                self._count(self._scratch, "feedback")
        else:
            error = torch.empty(numel, dtype=dtype)
        self._errors[side, key] = error
        apart = scattered(joined(tuple(spans or ())))
        copied = sum(span.stop - span.start for span in apart)
        if dtype is None:  # decoded, joined and then copied
            self.saved_bytes += 4 * (2 * numel + copied)
        else:
            self.saved_bytes += dtype.itemsize * (numel + copied)
        self._count(error, "feedback")


class StillLines(Lines):
    """The links of a rank that is alone here and stands for `spec.ranks` of them."""

    def __init__(self, spec: StepSpec, zero: Zero, count: Count) -> None:
        self.wire, self.place = spec.wire, torch.device(spec.device)
        self.world = spec.ranks
        whole = zero.stage == 0
        self.ranks, self.replicas = (1, spec.ranks) if whole else (spec.ranks, 1)
        self.rank, self.mesh, self.types = 0, None, TYPES
        link = StillLink(spec, spec.ranks, count) if spec.ranks > 1 else None
        self.shard = None if whole else link
        self.replicate = link if whole else None
        self.link, self._count = link, count

    @property
    def traffic(self) -> Counter[Exchange]:
        return self.link.traffic if self.link is not None else Counter()

    def buffer(self, numel: int, dtype: torch.dtype, *, replicate: bool = False) -> torch.Tensor:
        tensor = torch.empty(numel, dtype=dtype, device=self.place)
        self._count(tensor, "wire buffers")
        return tensor

    def take_first(self, values: torch.Tensor) -> None:
        pass

    def close(self) -> None:
        pass


class _Agreed(Backward):
    """A backward whose other ranks used the same parameters."""

    def _start_agreement(self) -> tuple[torch.Tensor, None]:
        return torch.empty(len(self.helds)), None

    def _agreement(self, flags: torch.Tensor, work: object) -> tuple[set[Held], list[Bucket]]:
        late = [bucket for bucket in self.buckets if bucket.late]
        return {held for held in self.helds if held.used}, late

    def _told(self, found: Any) -> Any:
        return found


def shard(model: nn.Module, spec: StepSpec, count: Count) -> Sharding:
    """Splits a fake model as `lz.shard_` would on rank 0 of `spec.ranks`; exchanges nothing."""
    zero = spec.zero
    if zero is None:
        raise ConfigError("zero: the step has no stage to shard for")
    lines = StillLines(spec, zero, count)
    sharding = Sharding(zero, lines, splitting._units(model, zero, lines))
    agreed = _Agreed(
        sharding.backward.buckets, sharding.lent, sharding.backward.helds, sharding._release,
        sharding._sums_came, gated=zero.stage == 3,
    )  # fmt: skip
    sharding.backward = agreed
    splitting._split(model, sharding)
    for unit in sharding.units:
        if unit is sharding.root or unit.helds:
            announce(unit.module, unit)
    model.__dict__[SHARDING] = sharding
    guard.register()
    return sharding


def norm(sharding: Sharding) -> None:
    """The operations of `grad_norm` on this rank."""
    lines = sharding.lines
    split = lines.ranks > 1
    ranks = lines.ranks if split else lines.world
    helds = sharding.parameters.values()
    squares([chunk(held, 0, ranks, split) for held in helds], lines.place)


def gradients(sharding: Sharding) -> list[torch.Tensor]:
    """This rank's gradients, as clipping scales them."""
    found = (held.sharded.grad for held in sharding.parameters.values())
    return [local(gradient) for gradient in found if gradient is not None]


def whole_copies(sharding: Sharding) -> list[torch.Tensor]:
    """The memory of what this rank gathered: lasting copies and slots."""
    found = [s.whole for unit in sharding.units for s in unit.segments if s.whole is not None]
    found += [w for unit in sharding.units for slot in unit.slots or () for w in slot.wholes]
    return [tensor for whole in found for tensor in (whole.flat, *whole.views)]


def encoder(spec: StepSpec) -> Codec | None:
    """The codec of gradients, None without one (and for auto, whose choice is not known yet)."""
    name = spec.wire.codec
    return None if name in ("none", AUTO) else codec(name)
