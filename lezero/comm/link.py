"""A wire bound to the ranks of one mesh axis: reduce-scatter, all-gather, all-reduce.

    link = Link(Wire(), mesh, "shard")
    pending = link.reduce_scatter(gradients, shard, key="layers.0")    # sent, not waited for
    ...                                                                # compute
    pending.wait()                                                     # `shard` is the sum

Every rank calls the same collectives in the same order. Sums are taken in rank order in fp32
(inside the hosts first with the hierarchical topology), so a result does not depend on timing, and
an all-reduce is bit for bit a reduce-scatter followed by an all-gather.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from lezero import __version__
from lezero.comm import legal
from lezero.comm.account import Account, sent_bytes
from lezero.comm.chooser import Chooser
from lezero.comm.feedback import Feedback
from lezero.comm.mesh import Mesh
from lezero.comm.pending import Call, Pending, Queue, Steps
from lezero.comm.route import Route, Span
from lezero.comm.routing import Routing, connect
from lezero.comm.wire import AUTO, Wire
from lezero.core import device, groups
from lezero.core.errors import ConfigError, DistributedError, OrderError

TYPES = (torch.float32, torch.bfloat16, torch.float64)


class Link:
    """Made by every rank together; `timeout_s` bounds how long a `wait` waits for other ranks (by
    default as long as a collective of all ranks may take: `groups.join(timeout_s=…)`).

    `hosts`: which ranks (places on the axis) share a host, where the caller knows better than what
    would be found. Raises `ConfigError` for a topology that they do not allow, `DistributedError`
    when another rank was given something else. Each link has groups of its own, so links never wait
    for each other. Close it to give them back.
    """

    def __init__(
        self,
        wire: Wire,
        mesh: Mesh,
        axis: str,
        *,
        timeout_s: float | None = None,
        hosts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.wire, self.size, self.rank = wire, mesh.size(axis), mesh.index(axis)
        self.ranks = mesh.ranks(axis)
        """Of this line, by their place on the axis."""
        self.account = Account()
        """Bytes that this rank has sent."""
        self._device = torch.device("cpu") if mesh.kind == "cpu" else device.device()
        timeout_s = groups.joined_timeout_s() if timeout_s is None else timeout_s
        self._queue = Queue(timeout_s, self._device)
        self._agree(axis, mesh, hosts)
        self._routing: Routing | None = None
        self._route: Route = Alone(self._device)
        self.topology = "alone"
        """How it moves: flat, hierarchical or shared; alone with one rank."""
        if self.size > 1:
            self._routing = connect(
                wire,
                mesh,
                axis,
                device=self._device,
                account=self.account,
                timeout_s=timeout_s,
                hosts=hosts,
            )
            self.topology, self._route = self._routing.topology, self._routing.route
        self.chooser: Chooser | None = None
        """With codec auto and several ranks: what chooses, and what it chose."""
        if self._routing is not None and wire.codec == AUTO:
            self.chooser = Chooser(mesh, axis, self._routing, self._queue, wire.budget)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Which ranks (places on the axis) share a host, as far as this wire asked."""
        return self._routing.hosts.ranks if self._routing is not None else ((0,),)

    @property
    def codec(self) -> str:
        """The codec of gradients in use: that of the wire, or what auto has chosen so far."""
        if self.wire.codec == AUTO:
            return self.chooser.codec if self.chooser is not None else "none"
        return self.wire.codec

    def step_done(self) -> None:
        """Every rank calls it once a step, after its last sums: where codec auto measures and
        switches."""
        if self.chooser is not None:
            self.chooser.step_done()

    @property
    def feedback(self) -> Feedback | None:
        """The kept errors, to save and to load; None without feedback or with one rank."""
        return self._routing.feedback if self._routing is not None else None

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Inside, the kept errors stay as they are, and codec auto does not look. Nothing is in
        flight."""
        coded = self._routing.coded if self._routing is not None else None
        chooser, self.chooser = self.chooser, None
        try:
            with coded.without_feedback() if coded is not None else contextlib.nullcontext():
                yield
        finally:
            self.chooser = chooser

    def sent_bytes(self, operation: str, numel: int, dtype: torch.dtype) -> int:
        """The documented formula: bytes this rank sends for one collective on `numel` elements."""
        if self._routing is None:
            return 0
        return sent_bytes(
            operation,
            numel,
            dtype.itemsize,
            topology=self.topology,
            size=self.size,
            hosts=len(self._routing.hosts.ranks),
            codec=self._routing.codec,
            gather=self._routing.gather,
        )

    def check(self, operation: str) -> None:
        """Raises `ConfigError` when this wire may not be used for `operation`; asked once, early.

        `operation`: reduce_scatter, all_gather or all_reduce.
        """
        wire = self.wire
        legal.check(legal.Case(wire.codec, wire.gather, wire.feedback, self.topology, operation))

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` zeros in memory that this link moves without copying it first.

        The first use of new memory is the slowest: take buffers once and keep them.
        """
        return self._route.buffer(numel, dtype)

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        out: torch.Tensor,
        *,
        key: str,
        spans: Sequence[Span] | None = None,
    ) -> Pending:
        """`out` (n,) becomes the sum over the ranks of their chunk `rank` of `flat` (size · n,).

        fp32 or bf16 each. `key` names the buffer: the same at every step and on every rank. `spans`
        tell which parameters lie where in `flat`, for feedback (by default one named `key`; what no
        span covers is padding). `out` may be its chunk of `flat`. The caller pads: `ConfigError`
        when `flat` does not hold `size` chunks.
        """
        self._check("reduce_scatter", key, flat=flat, out=out)
        self._fits("reduce_scatter", key, "flat", flat, "out", out)
        named = _named(key, flat, spans)
        self._observe("reduce_scatter", key, flat, named)
        steps = self._route.reduce_scatter(flat, out, key, named)
        return self._launch(steps, "reduce_scatter", key, flat, out)

    def all_gather(self, shard: torch.Tensor, out: torch.Tensor, *, key: str) -> Pending:
        """`out` (size · n,) becomes every rank's `shard` (n,), in rank order; both of one type.

        `shard` may be a view of its own place in `out`, where nothing is written: if it changes
        before the end it stays so, and other ranks have it as it was or as it is.
        """
        self._check("all_gather", key, shard=shard, out=out)
        self._fits("all_gather", key, "out", out, "shard", shard)
        if shard.dtype != out.dtype:
            raise ConfigError(
                f"all_gather '{key}': shard is {shard.dtype} and out is {out.dtype}; "
                "allowed is one type for both"
            )
        if self.wire.gather != "none" and self.size > 1 and _inside(shard, out):
            raise ConfigError(
                f"all_gather '{key}': the shard lies in out, where decoding with wire.gather "
                f"'{self.wire.gather}' overwrites it; give a shard outside of out"
            )
        self._observe("all_gather", key, out)
        return self._launch(self._route.all_gather(shard, out, key), "all_gather", key, out, shard)

    def all_reduce(
        self, flat: torch.Tensor, *, key: str, spans: Sequence[Span] | None = None
    ) -> Pending:
        """`flat` (size · n,) becomes the sum over the ranks, in place."""
        self._check("all_reduce", key, flat=flat)
        if flat.numel() % self.size:
            raise ConfigError(
                f"all_reduce '{key}': {flat.numel()} elements do not divide among {self.size} "
                "ranks; pad the buffer to a multiple"
            )
        self.check("all_reduce")
        named = _named(key, flat, spans)
        self._observe("all_reduce", key, flat, named)
        steps = self._route.all_reduce(flat, key, named)
        return self._launch(steps, "all_reduce", key, flat)

    def close(self) -> None:
        """Ends the link's groups and gives its memory back; on every rank. Waits for nothing."""
        self._queue.abandon()
        self._route.close()
        if self._routing is not None:
            for group in self._routing.made:
                groups.end(group)
        self._routing, self._route = None, Closed(self._device)

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _agree(self, axis: str, mesh: Mesh, hosts: Sequence[Sequence[int]] | None) -> None:
        """Ranks that joined with another wire or another LeZero are told which key differs."""
        mine = {"lezero": __version__, "axis": axis, "mesh.kind": mesh.kind}
        mine["mesh"] = ", ".join(f"{name}: {size}" for name, size in mesh.axes.items())
        mine |= {f"wire.{key}": value for key, value in self.wire.to_dict().items()}
        given = None if hosts is None else [[*h] if isinstance(h, Sequence) else h for h in hosts]
        every: list[dict[str, Any]] = groups.gather_objects({"all": mine, "hosts": given})
        for rank, other in enumerate(one["all"] for one in every):
            for key in sorted({*mine, *other}):
                _same(key, rank, other.get(key), groups.rank(), mine.get(key))
        for first, *others in mesh.lines(axis):  # each line has hosts of its own
            for rank in others:
                _same("hosts", rank, every[rank]["hosts"], first, every[first]["hosts"])
            _check_hosts(every[first]["hosts"], self.size)

    def _observe(
        self, operation: str, key: str, x: torch.Tensor, spans: tuple[Span, ...] = ()
    ) -> None:
        if self.chooser is not None:
            self.chooser.observe(operation, key, x, spans)

    def _launch(
        self, steps: Steps, operation: str, key: str, x: torch.Tensor, *others: torch.Tensor
    ) -> Pending:
        call = Call(operation, tuple(x.shape), x.dtype, key)
        return self._queue.launch(steps, call, x, *others)

    def _check(self, operation: str, key: str, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype not in TYPES:
                raise ConfigError(
                    f"{operation} '{key}': {name} is {tensor.dtype}; allowed is float32, bfloat16 "
                    "or float64"
                )
            codec = self.wire.gather if operation == "all_gather" else self.wire.codec
            if tensor.dtype == torch.float64 and codec not in ("none", AUTO) and self.size > 1:
                field = "gather" if operation == "all_gather" else "codec"
                raise ConfigError(
                    f"{operation} '{key}': {name} is float64, which no codec carries; allowed with "
                    f"it is wire.{field}='none', not '{codec}'"
                )
            if tensor.dim() != 1 or not tensor.is_contiguous():
                raise ConfigError(
                    f"{operation} '{key}': {name} has shape {tuple(tensor.shape)} and strides "
                    f"{tensor.stride()}; allowed is a flat, contiguous tensor"
                )
            if tensor.device.type != self._device.type:
                raise ConfigError(
                    f"{operation} '{key}': {name} is on {tensor.device}, but this link moves "
                    f"tensors on {self._device}; give its mesh the kind '{tensor.device.type}'"
                )

    def _fits(
        self, operation: str, key: str, whole: str, x: torch.Tensor, part: str, y: torch.Tensor
    ) -> None:
        if x.numel() != self.size * y.numel():
            raise ConfigError(
                f"{operation} '{key}': {whole} has {x.numel()} elements and {part} {y.numel()}; "
                f"{whole} must hold {self.size} chunks as long as {part} (pad it)"
            )


def _check_hosts(hosts: list[Any] | None, size: int) -> None:
    if hosts is None:
        return
    places: list[Any] = []
    for host in hosts:
        places += host if isinstance(host, list) else [None]
    if not all(isinstance(p, int) for p in places) or sorted(places) != list(range(size)):
        raise ConfigError(
            f"hosts: got {hosts}; allowed are lists that hold each of the places 0 to {size - 1} "
            "on the axis once"
        )


def _same(key: str, rank: int, theirs: object, other: int, value: object) -> None:
    if theirs != value:
        raise DistributedError(
            f"{key} is {theirs!r} on rank {rank} and {value!r} on rank {other}; start every rank "
            "with the same"
        )


def _named(key: str, flat: torch.Tensor, spans: Sequence[Span] | None) -> tuple[Span, ...]:
    return (Span(key, 0, flat.numel(), 0),) if spans is None else tuple(spans)


def _inside(part: torch.Tensor, whole: torch.Tensor) -> bool:
    begin = part.data_ptr() - whole.data_ptr()
    return part.numel() > 0 and 0 <= begin < whole.nbytes


class Alone(Route):
    """One rank: copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, key: str, spans: tuple[Span, ...]
    ) -> Steps:
        out.copy_(flat)
        yield from ()

    def all_gather(self, shard: torch.Tensor, out: torch.Tensor, key: str) -> Steps:
        if shard.data_ptr() != out.data_ptr():
            out.copy_(shard)
        yield from ()

    def all_reduce(self, flat: torch.Tensor, key: str, spans: tuple[Span, ...]) -> Steps:
        yield from ()


class Closed(Alone):
    """After `close`: whatever comes is a mistake of the caller."""

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        raise OrderError("buffer: this link is closed; make a new one")

    def reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, key: str, spans: tuple[Span, ...]
    ) -> Steps:
        raise OrderError(f"reduce_scatter '{key}': this link is closed; make a new one")

    def all_gather(self, shard: torch.Tensor, out: torch.Tensor, key: str) -> Steps:
        raise OrderError(f"all_gather '{key}': this link is closed; make a new one")

    def all_reduce(self, flat: torch.Tensor, key: str, spans: tuple[Span, ...]) -> Steps:
        raise OrderError(f"all_reduce '{key}': this link is closed; make a new one")
