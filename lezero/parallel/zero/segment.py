"""The memory of one segment: shards, whole copies, and the gather that fills these from those.

Shapes are flat. With one rank on the shard axis the registered parameters are the user's own; they
compute themselves where the types agree (the whole copy is an alias), else through a cast copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from lezero.comm.link import Link
from lezero.comm.pending import Pending
from lezero.parallel.zero.held import Held, distributed, mark_alike
from lezero.parallel.zero.layout import Layout
from lezero.parallel.zero.lines import Lines

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lezero.parallel.zero.unit import Unit


class Whole:
    """Memory for the whole copies of one segment: what a gather writes."""

    def __init__(self, segment: Segment) -> None:
        layout = segment.layout
        self.flat = segment.buffer(layout.numel, segment.compute)
        if layout.contiguous:
            ends = [(p.at, p.at + p.rows.numel, p.rows.shape) for p in layout.places]
            self.views = [self.flat[a:b].view(shape) for a, b, shape in ends]
        else:
            kinds = {"dtype": segment.compute, "device": self.flat.device}
            self.views = [torch.empty(p.rows.shape, **kinds) for p in layout.places]  # type: ignore[call-overload]
        self._into: list[torch.Tensor] = []
        self._from: list[torch.Tensor] = []
        for place, view in zip(layout.places, self.views, strict=True):
            for inside, outside in (
                () if layout.contiguous else layout.pieces(self.flat, place, view)
            ):
                self._into.append(outside if place.rows.shape else view)
                self._from.append(inside if place.rows.shape else inside[0])

    def unpack(self) -> None:
        """Copies packed parameters out of the gathered chunks."""
        if self._into:
            torch._foreach_copy_(self._into, self._from)


class Segment:
    """One or more parameters that move in one collective (see `layout`).

    `lines.shard` joins the ranks that split it, None where there is one. `lasting`: whole copies
    stay between uses (stages 0 to 2), and shards are views of them where the types agree.
    """

    def __init__(
        self,
        helds: list[Held],
        compute: torch.dtype,
        lines: Lines,
        *,
        lasting: bool,
    ) -> None:
        self.helds, self.compute, self.lines, self.lasting = helds, compute, lines, lasting
        self.link: Link | None = lines.shard
        self.ranks, self.rank = lines.ranks, lines.rank
        self.layout = Layout.of([(h.name, h.rows.shape) for h in helds], self.ranks)
        for held, spot in zip(helds, self.layout.places, strict=True):
            held.segment, held.place = self, spot
        self.key = helds[0].name
        self.master = helds[0].dtype
        self.encoded = self.link is not None and lines.wire.gather != "none"
        self.alias = self.link is None and compute == self.master
        self.unit: Unit
        self.shard: torch.Tensor | None = None
        self.whole: Whole | None = None
        self._pending: Pending | None = None

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for segments whose whole copies may take turns in one piece of memory."""
        places = tuple((p.rows, p.at) for p in self.layout.places)
        return places, self.compute, self.ranks

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.lines.buffer(numel, dtype)

    def allocate(self) -> list[torch.Tensor]:
        """Makes the memory of the shards; returns each parameter's rows of this rank, unset."""
        chunk = self.layout.chunk
        if self.lasting and not self.alias:
            self.whole = Whole(self)
        if self.link is None:
            kinds = {"dtype": self.master, "device": self.lines.place}
            return [
                torch.empty(held.rows.shape, **kinds)  # type: ignore[call-overload]
                if held.sharded.is_meta
                else held.sharded.detach()
                for held in self.helds
            ]
        if self.whole is not None and self.compute == self.master and not self.encoded:
            self.shard = self.whole.flat[self.rank * chunk : (self.rank + 1) * chunk].data
        else:
            self.shard = self.buffer(chunk, self.master)
        places = self.layout.places
        return [self.layout.shard(self.shard, place, self.rank) for place in places]

    def show_shards(self, rows: list[torch.Tensor], mesh: DeviceMesh | None) -> None:
        """Registers `rows` (from `allocate`) as the parameters."""
        for held, mine in zip(self.helds, rows, strict=True):
            if self.link is None and not held.sharded.is_meta:
                held.replace(held.sharded)
            else:
                made = distributed(mine, held.rows, mesh)
                held.replace(nn.Parameter(made, held.sharded.requires_grad))
            self.unit.sharding.watch(held)

    def show_on_meta(self, mesh: DeviceMesh | None) -> None:
        """Registers shards without memory, in place of whole parameters without memory."""
        shapes = [held.rows.shard_shape(self.rank) for held in self.helds]
        rows = [torch.empty(shape, dtype=self.master, device="meta") for shape in shapes]
        self.show_shards(rows, mesh)

    def bind(self, whole: Whole | None) -> None:
        """Makes the leaves that compute: views of `whole`, or of the parameters themselves."""
        self.whole = whole
        for at, held in enumerate(self.helds):
            # .data: a version counter of their own, which a gather into `whole` does not move
            data = held.sharded.data if whole is None else whole.views[at].data
            held.full = nn.Parameter(data, requires_grad=held.sharded.requires_grad)
            mark_alike(held.full, held.sharded)

    @torch.no_grad()
    def gather(self) -> None:
        """Starts to fill the whole copies from the shards of all ranks."""
        if self.alias:
            for held in self.helds:
                assert held.full is not None
                if held.full.data_ptr() != held.sharded.data_ptr():
                    held.full.data = held.sharded.data
            return
        assert self.whole is not None
        if self.link is None:
            views, masters = self.whole.views, [h.sharded.detach() for h in self.helds]
            torch._foreach_copy_(views, masters)
            return
        assert self.shard is not None
        chunk, flat = self.layout.chunk, self.whole.flat
        source = self.shard
        if self.compute != self.master:
            source = flat[self.rank * chunk : (self.rank + 1) * chunk]
            if self.encoded:  # all ranks, this one too, compute with what decoding writes there
                source = torch.empty_like(source)
            source.copy_(self.shard)
        self._pending = self.link.all_gather(source, flat, key=self.key)

    def finish_gather(self) -> None:
        """Waits until the whole copies are there."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
            assert self.whole is not None
            with torch.no_grad():
                self.whole.unpack()

    def move_version(self, step: int) -> None:
        """Adds `step` to the leaves' version counters, which autograd compares (Note [slots])."""
        leaves = tuple(h.full for h in self.helds if h.full is not None)
        versions = tuple(leaf._version + step for leaf in leaves)
        torch._C._autograd._unsafe_set_version_counter(leaves, versions)
