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

from collections.abc import Sequence
from types import TracebackType

import torch

from lezero.comm.buffers import Buffers
from lezero.comm.flat import Flat
from lezero.comm.mesh import Mesh
from lezero.comm.pending import Pending, Queue, Steps
from lezero.comm.route import Route, Span
from lezero.comm.shared import Shared
from lezero.comm.topology import find_hosts
from lezero.comm.wire import Wire
from lezero.core import device, groups
from lezero.core.errors import ConfigError

TYPES = (torch.float32, torch.bfloat16)


class Link:
    """Made by every rank together; `timeout_s` bounds how long a `wait` waits for other ranks.

    Each link has groups of its own, so links never wait for each other. Close it to give them back.
    """

    def __init__(self, wire: Wire, mesh: Mesh, axis: str, *, timeout_s: float = 600.0) -> None:
        if wire.codec != "none" or wire.gather != "none":
            raise ConfigError(f"wire: codec {wire.codec!r}: allowed is none")
        self.wire, self.size, self.rank = wire, mesh.size(axis), mesh.index(axis)
        self._device = torch.device("cpu") if mesh.kind == "cpu" else device.device()
        self._buffers = Buffers(self._device)
        self._queue = Queue(timeout_s)
        lanes = [groups.make(mesh.lines(axis), mesh.kind, timeout_s) for _ in range(2)]
        self._lanes = lanes
        self.topology = "flat"
        self._route: Route = Alone()
        if lanes[0] is not None and lanes[1] is not None:
            self.topology = self._choose(lanes[0], mesh.kind)
            if self.topology == "shared":
                self._route = Shared(lanes[0], mesh.ranks(axis))
            else:
                self._route = Flat((lanes[0], lanes[1]), self._buffers)

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` zeros in memory that this link moves without copying it first.

        The first use of new memory is the slowest: take buffers once and keep them.
        """
        return self._route.buffer(numel, dtype)

    def common(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """As `buffer`, but one memory that all ranks of the host see, where the topology is shared.

        All ranks call it together. Each writes its own part only; `all_gather` with `out` in such
        memory and `shard` in its place there moves nothing, it waits until every rank has written.
        A rank must not write again before the others have read: finish a collective in between
        that they enter after reading. Elsewhere the same as `buffer`.
        """
        return self._route.common(numel, dtype)

    def reduce_scatter(
        self, flat: torch.Tensor, out: torch.Tensor, *, key: str, spans: Sequence[Span] = ()
    ) -> Pending:
        """`out` (n,) becomes the sum over the ranks of their chunk `rank` of `flat` (size · n,).

        fp32 or bf16 each. `key` names the buffer: the same at every step and on every rank. `spans`
        tell which parameters lie where in `flat`, for feedback. `out` may be its chunk of `flat`.
        The caller pads: `ConfigError` when `flat` does not hold `size` chunks.
        """
        self._check("reduce_scatter", key, flat=flat, out=out)
        self._fits("reduce_scatter", key, "flat", flat, "out", out)
        steps = self._route.reduce_scatter(flat, out, key, tuple(spans))
        return self._launch(steps, "reduce-scatter", key)

    def all_gather(self, shard: torch.Tensor, out: torch.Tensor, *, key: str) -> Pending:
        """`out` (size · n,) becomes every rank's `shard` (n,), in rank order; both of one type.

        `shard` may be a view of its own place in `out`.
        """
        self._check("all_gather", key, shard=shard, out=out)
        self._fits("all_gather", key, "out", out, "shard", shard)
        if shard.dtype != out.dtype:
            raise ConfigError(
                f"all_gather '{key}': shard is {shard.dtype} and out is {out.dtype}; "
                "allowed is one type for both"
            )
        return self._launch(self._route.all_gather(shard, out, key), "all-gather", key)

    def all_reduce(self, flat: torch.Tensor, *, key: str, spans: Sequence[Span] = ()) -> Pending:
        """`flat` (size · n,) becomes the sum over the ranks, in place."""
        self._check("all_reduce", key, flat=flat)
        if flat.numel() % self.size:
            raise ConfigError(
                f"all_reduce '{key}': {flat.numel()} elements do not divide among {self.size} "
                "ranks; pad the buffer to a multiple"
            )
        return self._launch(self._route.all_reduce(flat, key, tuple(spans)), "all-reduce", key)

    def close(self) -> None:
        """Ends the link's groups and gives its memory back; on every rank. Waits for nothing."""
        self._queue.abandon()
        self._route.close()
        for group in self._lanes:
            groups.end(group)
        self._lanes = []

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _choose(self, group: torch.distributed.ProcessGroup, kind: str) -> str:
        wanted = self.wire.topology
        if wanted == "flat" or (wanted == "auto" and kind != "cpu"):
            return "flat"
        if kind != "cpu":
            raise ConfigError(
                f"wire.topology: '{wanted}' shares the memory of hosts, but the mesh is of kind "
                f"'{kind}'; use auto or flat"
            )
        hosts = find_hosts(group)
        if wanted == "shared" and not hosts.single:
            raise ConfigError(
                f"wire.topology: 'shared' needs all {self.size} ranks to share one host's memory, "
                f"but they are on {len(hosts.ranks)}: {hosts.ranks}; use auto or flat"
            )
        return "shared" if hosts.single else "flat"

    def _launch(self, steps: Steps, operation: str, key: str) -> Pending:
        return self._queue.launch(steps, f"{operation} '{key}'")

    def _check(self, operation: str, key: str, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype not in TYPES:
                raise ConfigError(
                    f"{operation} '{key}': {name} is {tensor.dtype}; allowed is float32 or bfloat16"
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


class Alone(Route):
    """One rank: copies."""

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
