"""Process groups are made and destroyed here, and nowhere else.

Everything also works without a group: then the world is one rank. `join` and `leave` are for the
group of all ranks; `make` and `end` are for the groups of parts of them (the lines of a mesh, a
wire's own group). A group is made by every rank together, the ranks outside it too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from lezero.core import in_flight, meeting, observer, sockets
from lezero.core.errors import DistributedError, OrderError
from lezero.core.flags import flag
from lezero.core.launched import check_place, number
from lezero.core.launched import launched as launched

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

T = TypeVar("T")
_LOST = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "NCCL",
    "timed out",
    "Timed out",
    "gloo/",
)
_TIMEOUT_S = 600.0
_LET_GO_S = 0.01
_CABLE_S = 3.0


def join(timeout_s: float = _TIMEOUT_S, backend: str | None = None) -> None:
    """Joins the group that the environment describes; without one, or twice, does nothing.

    Raises `DistributedError` when the ranks cannot meet, with the address they tried, and
    `ConfigError` for a place among them that cannot be, and for more ranks on this machine than
    it has accelerators (with a `backend`, that is the caller's business).
    """
    import torch.distributed as dist

    from lezero.core import device

    if active():
        return
    check_place()
    if not launched():
        return
    kind = device.accelerator()
    if kind is not None:
        if backend is None:
            device.require(max(number("LOCAL_WORLD_SIZE", 1), local_rank() + 1))
        device.use(device.device())
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    need_interface()
    try:
        if rank() != 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # (torch elastic's store is the launcher's)
            host, port = where.rsplit(":", 1)
            meeting.need_store(host, int(port), timeout_s)
        with sockets.noted():
            dist.init_process_group(
                backend or device.backend_for(kind), timeout=timedelta(seconds=timeout_s)
            )
        _let_go_at_exit()
    except Exception as error:
        raise DistributedError(
            f"rank {rank()} of {os.environ['WORLD_SIZE']} could not join the others at {where}: "
            f"{str(error).splitlines()[0]}. Check that the port is free and that every rank "
            "was started with the same address."
        ) from error


@functools.cache
def _let_go_at_exit() -> None:
    """A thread of Gloo drops what it moved last some time after the wait for it is over, and needs
    the interpreter's lock for that. One that asks for it when the interpreter ends aborts the
    process, which has done all its work: so it may have it before."""
    atexit.register(time.sleep, _LET_GO_S)


def need_interface() -> None:
    """`DistributedError` where Gloo would find no network interface, with what there is.

    One that was just switched on is waited for: its cable takes a moment to be seen.
    """
    import psutil

    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    end = time.monotonic() + _CABLE_S
    while True:
        found = psutil.net_if_stats()
        up = [name for name, stats in found.items() if stats.isup]
        missing = [name for name in wanted.split(",") if name and name not in up]
        if not set(missing) & set(found) or time.monotonic() > end:
            break
        time.sleep(0.05)
    listed = ", ".join(f"{name} ({'up' if name in up else 'down'})" for name in sorted(found))
    if missing:
        raise DistributedError(
            f"GLOO_SOCKET_IFNAME={wanted}: there is no network interface '{missing[0]}' that is "
            f"up; this machine has {listed or 'none'}"
        )
    if not up:
        raise DistributedError(
            f"no network interface is up, not even the loopback: this machine has "
            f"{listed or 'none'}. Bring one up (`ip link set lo up`), or run one rank."
        )


def need_joined() -> None:
    """`OrderError` in a rank of several that has not joined them: each would go on alone."""
    if active():
        return
    check_place()
    if launched():
        raise OrderError(
            f"this process is rank {rank()} of {os.environ['WORLD_SIZE']} and has not joined the "
            "others, so each would work alone: call lezero.core.groups.join() at the beginning"
        )


def join_alone() -> None:
    """A group of this one process, for what needs a group at any size (DTensor); else nothing."""
    import torch.distributed as dist

    from lezero.core import device

    if active():
        return
    need_joined()
    backend = "cpu:gloo"
    kind = device.accelerator()
    if kind is not None:
        backend += f",{kind}:{device.backend_for(kind)}"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def make(
    partition: Sequence[Sequence[int]],
    kind: str = "cpu",
    timeout_s: float | None = None,
    *,
    single: bool = False,
) -> dist.ProcessGroup | None:
    """A new group for each part of `partition` (lists of ranks); returns the one this rank is in.

    Every rank calls this with the same arguments, in the same order. `kind` is the kind of device
    whose tensors the group moves; `timeout_s` is by default what the ranks have joined with. A part
    of one rank gets a group only with `single`; otherwise, and in a process without a group of all
    ranks, the answer there is None. Ranks of a Gloo group go on when all have it: one that left
    before would end the others' wait for it.
    """
    if not active():
        return None
    _let_go_at_exit()
    import torch.distributed as dist

    from lezero.core import device

    mine = None
    backend, limit = device.backend_for(kind), timedelta(seconds=timeout_s or joined_timeout_s())
    for part in partition:
        if len(part) < 2 and not single:
            continue
        with sockets.noted():
            group = dist.new_group(list(part), limit, backend)
        if rank() in part:
            mine = group
    if mine is not None and backend == "gloo":
        in_flight.wait(dist.barrier(mine, async_op=True))
    return mine


def joined_timeout_s() -> float:
    """How long a collective of the group of all ranks may take; 600 where nobody said."""
    if not active():
        return _TIMEOUT_S
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    try:
        limit: timedelta = world._get_backend(_place()).options._timeout
    except (RuntimeError, AttributeError):  # a backend without options
        return _TIMEOUT_S
    return limit.total_seconds()


def end(group: dist.ProcessGroup | None) -> None:
    """Destroys a group that `make` returned; nothing for None or after `leave`."""
    import torch.distributed as dist

    if group is not None and active():
        # torch no longer knows a group that went with all the others.
        with contextlib.suppress(ValueError, RuntimeError):
            dist.destroy_process_group(group)


def leave() -> None:
    """Leaves the group; safe to call when there is none, and while an exception is on its way."""
    import torch.distributed as dist

    watcher = observer.current()
    if watcher is not None:
        watcher.close(sys.exc_info()[1])
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        sockets.forget()
        # A Gloo group ends its threads with its last reference. One that lives in a cycle until the
        # interpreter ends may drop a tensor in its thread then, which aborts the process. DDP's are
        # ended here with the interpreter's lock held: a thread that still drops what it moved last
        # would wait for that lock and be waited for, so it may have it first.
        time.sleep(_LET_GO_S)
        gc.collect()


def abort() -> None:
    """Ends every wait of this process in a collective; its groups are of no use afterwards."""
    import torch.distributed as dist

    if not active():
        return
    # NCCL's own way; the sockets are Gloo's.
    if dist.get_backend() != "gloo" and dist.group.WORLD is not None:
        dist.group.WORLD.abort()
    sockets.shut()


def active() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    if active():
        import torch.distributed as dist

        return dist.get_rank()
    return number("RANK") if launched() else 0


def world_size() -> int:
    if active():
        import torch.distributed as dist

        return dist.get_world_size()
    return 1


def kind() -> str:
    """The kind of device whose tensors the group of all ranks moves; "cpu" without a group."""
    if not active():
        return "cpu"
    return _place().type


def ranks_here() -> int:
    """How many ranks of this job share this machine."""
    return number("LOCAL_WORLD_SIZE", 1) if launched() else 1


def local_rank() -> int:
    none = os.environ.get("LOCAL_RANK") == "-1"  # as some scripts say that nobody launched them
    return 0 if none else number("LOCAL_RANK")


def is_main() -> bool:
    return rank() == 0


def broadcast_object(value: T) -> T:
    """Rank 0's `value` on every rank. Only plain data: it travels as JSON, not as pickle."""
    if not active() or world_size() == 1:
        return value
    return _exchange(value if is_main() else None)[0]


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's `value`, in rank order, on every rank (of `group`). Plain data only (JSON)."""
    if not active() or world_size() == 1:
        return [value]
    return _exchange(value, group)


def _exchange(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    import json

    import torch
    import torch.distributed as dist

    place = _place(group)
    body = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(place)
    sizes = [
        torch.zeros(1, dtype=torch.int64, device=place) for _ in range(dist.get_world_size(group))
    ]
    with watched("all_gather", (1,), torch.int64, "size of a document"):
        mine = torch.tensor([body.numel()], device=place)
        in_flight.wait(dist.all_gather(sizes, mine, group=group, async_op=True))
    longest = int(max(size.item() for size in sizes))
    padded = torch.zeros(longest, dtype=torch.uint8, device=place)
    padded[: body.numel()] = body
    bodies = [torch.empty_like(padded) for _ in sizes]
    # The parts of the world may have documents of their own sizes.
    shape = padded.shape if group is None else ()
    with watched("all_gather", shape, padded.dtype, "document"):
        in_flight.wait(dist.all_gather(bodies, padded, group=group, async_op=True))
    return [
        json.loads(bytes(b[: int(size.item())].cpu().numpy().tobytes()))
        for b, size in zip(bodies, sizes, strict=True)
    ]


def _place(group: dist.ProcessGroup | None = None) -> torch.device:
    import torch
    import torch.distributed as dist

    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    from lezero.core import device

    return device.device()


@contextlib.contextmanager
def watched(op: str, shape: Sequence[int], dtype: Any, label: str) -> Iterator[None]:
    """Tells the observer, if there is one, of the blocking collective inside the block, and names
    a rank that is lost there."""
    watcher = observer.current()
    if watcher is not None:
        watcher.enter(op, shape, dtype, label)
    with naming_lost_ranks():
        yield  # what fails inside has not completed: its group is broken
    if watcher is not None:
        watcher.leave()


@contextlib.contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Turns the backend's report that another rank is gone into a `DistributedError`.

    Its text is the observer's where there is one; the backend's own words come with LEZERO_DEBUG.
    """
    try:
        yield
    except RuntimeError as error:
        raw = str(error)
        lost = active() and world_size() > 1 and any(sign in raw for sign in _LOST)
        if isinstance(error, DistributedError) or not lost:
            raise
        watcher = observer.current()
        text = watcher.explain(error) if watcher is not None else None
        if text is None:
            how = "which died or left"
            if "imed out" in raw:
                how = "which did not come to a collective before the backend's timeout"
            text = f"rank {rank()} lost contact with another rank, {how}"
        if flag("LEZERO_DEBUG"):
            text += f" [{raw.splitlines()[0][:300]}]"
        raise DistributedError(text) from error


def all_reduce_sum(tensor: torch.Tensor, label: str = "") -> torch.Tensor:
    """Sums `tensor` over the ranks in place and returns it. `label` names it where a rank hangs."""
    if active() and world_size() > 1:
        import torch.distributed as dist

        with watched("all_reduce", tensor.shape, tensor.dtype, label):
            if dist.get_backend() != "gloo" and tensor.device.type == "cpu":
                moved = tensor.to(_place())
                in_flight.wait(dist.all_reduce(moved, async_op=True))
                tensor.copy_(moved)
            else:
                in_flight.wait(dist.all_reduce(tensor, async_op=True))
    return tensor


def barrier() -> None:
    """Returns when every rank has come here."""
    if active() and world_size() > 1:
        import torch.distributed as dist

        with watched("barrier", (), None, ""):
            in_flight.wait(dist.barrier(async_op=True))
