"""The one place that speaks to an accelerator, over `torch.accelerator`.

Nothing here touches a device when imported. On a machine without one, every question has a CPU
answer: memory figures are 0 and `synchronize` does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from lezero.core.errors import ConfigError

if TYPE_CHECKING:
    import torch


def accelerator() -> str | None:
    """The kind of accelerator ("cuda", "xpu", "mps", "npu", …) or None."""
    import torch

    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None else None


def is_initialized() -> bool:
    """Whether this process has begun to use its accelerator; True where torch cannot tell."""
    import torch

    kind = accelerator()
    if kind is None:
        return False
    tells = getattr(torch.get_device_module(kind), "is_initialized", None)
    return tells is None or bool(tells())


def device(index: int | None = None) -> torch.device:
    """Where this rank computes: its accelerator (`index` or the local rank), else the CPU."""
    import torch

    kind = accelerator()
    if kind is None:
        return torch.device("cpu")
    if index is None:
        from lezero.core.groups import local_rank

        index = local_rank() % torch.accelerator.device_count()
    return torch.device(kind, index)


def count() -> int:
    """How many accelerators this process sees; 0 on CPU."""
    import torch

    return torch.accelerator.device_count() if accelerator() else 0


def require(ranks: int) -> None:
    """`ConfigError` for more ranks on this machine than accelerators: NCCL refuses two on one."""
    kind, found = accelerator(), count()
    if ranks > found:
        hide = " (CUDA_VISIBLE_DEVICES='')" if kind == "cuda" else ""
        raise ConfigError(
            f"{ranks} ranks were started on this machine, but it has {found} {kind} "
            f"device{'s' if found != 1 else ''}, and each rank needs its own. Start {found}, or "
            f"hide the devices{hide}: then the ranks compute on the processor"
        )


def use(place: torch.device) -> None:
    """Makes `place` the current device of this process."""
    import torch

    if place.type != "cpu":
        torch.accelerator.set_device_index(place.index or 0)


def using(place: torch.device) -> AbstractContextManager[None]:
    """Makes `place` the current device of this thread for a while: streams, graphs and Triton's
    kernels are otherwise those of another one. A new thread begins with the first device."""
    import torch

    if place.type == "cpu":
        return nullcontext()
    return torch.accelerator.device_index(place.index)


def synchronize(places: Iterable[torch.device] | None = None) -> None:
    """Waits for all work queued on accelerators among these devices, or on the current one."""
    import torch

    kind = accelerator()
    if kind is None:
        return
    for place in {torch.device(kind)} if places is None else set(places):
        if place.type == kind:
            torch.accelerator.synchronize(place)


def places(module: torch.nn.Module) -> set[torch.device]:
    """Where the parameters and buffers of a module are."""
    return {x.device for x in (*module.parameters(), *module.buffers())}


def memory_allocated() -> int:
    """Bytes held by tensors on the accelerator; 0 on CPU."""
    import torch

    if accelerator() == "mps":
        return torch.mps.current_allocated_memory()
    return torch.accelerator.memory_allocated() if accelerator() else 0


def max_memory_allocated() -> int:
    """Highest `memory_allocated` since `reset_peak`, in bytes; 0 on CPU, and on MPS: not kept."""
    import torch

    return torch.accelerator.max_memory_allocated() if _keeps_statistics() else 0


def reset_peak() -> None:
    """Starts a new measurement for `max_memory_allocated`."""
    import torch

    if _keeps_statistics():
        torch.accelerator.reset_peak_memory_stats()


def memory_free(place: torch.device | None = None) -> int:
    """Bytes that this rank could allocate on an accelerator, the current one where none is given;
    0 on CPU."""
    import torch

    if accelerator() == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    if not accelerator():
        return 0
    kept = torch.accelerator.memory_reserved(place) - torch.accelerator.memory_allocated(place)
    return int(torch.accelerator.get_memory_info(place)[0]) + kept


def empty_cache() -> None:
    """Gives memory that torch keeps, but no tensor holds, back to the accelerator."""
    import torch

    if accelerator() == "mps":
        torch.mps.empty_cache()
    elif accelerator():
        torch.accelerator.empty_cache()


def _keeps_statistics() -> bool:
    """Not MPS: there torch before 2.14 fails at questions about memory."""
    return accelerator() not in (None, "mps")


def with_doubles(x: torch.Tensor) -> torch.Tensor:
    """`x` where numbers of 64 bits are: MPS has none, so it comes to the CPU from there."""
    return x.cpu() if x.device.type == "mps" else x


def workspace_bytes() -> int:
    """What the libraries of matrix products allocate beside tensors, for forward and backward."""
    version = capability()
    if version is None:
        return 0
    return 2 * ((32 << 20) if version >= (9, 0) else (8 << 20) + (128 << 10))


def capability_of(place: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA device."""
    import torch

    return torch.cuda.get_device_capability(place)


def capability() -> tuple[int, int] | None:
    """Compute capability of an NVIDIA device, else None."""
    import torch

    return torch.cuda.get_device_capability() if accelerator() == "cuda" else None


def seed(number: int) -> None:
    """Seeds the generators of the processor and of every accelerator that there is.

    `torch.manual_seed` writes the caller's stack down for each kind of accelerator that there is
    not, which takes longer than a step of a small model.
    """
    import torch

    torch.default_generator.manual_seed(number)
    kind = accelerator()
    if kind is not None:
        module = torch.get_device_module(kind)
        getattr(module, "manual_seed_all", module.manual_seed)(number)


def kept_generators(place: torch.device) -> AbstractContextManager[None]:
    """Puts the random state of the processor back on leaving, and of all accelerators of the kind
    of `place`: seeding sets them all."""
    import torch

    if place.type == "cpu":
        return torch.random.fork_rng(())
    return torch.random.fork_rng(range(count()), device_type=place.type)


def sent(x: torch.Tensor, place: torch.device) -> torch.Tensor:
    """What the host made, at `place`: without waiting for what an accelerator computes, where it
    takes a copy of `x` first."""
    return x.to(place, non_blocking=place.type == "cuda")


def mark(place: torch.device) -> Callable[[], None]:
    """Marks what was queued on `place` so far: what is returned waits for it."""
    import torch

    if place.type == "cpu":
        return lambda: None
    event = torch.Event(device=place)
    event.record(torch.accelerator.current_stream(place))
    return event.synchronize


def processors(place: torch.device) -> int:
    """Multiprocessors of an NVIDIA device; 1 elsewhere."""
    import torch

    if place.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(place).multi_processor_count)


def stream_handle(place: torch.device) -> int:
    """The driver's handle of the current stream of an NVIDIA device."""
    import torch

    return int(torch.cuda.current_stream(place).cuda_stream)


def stream(place: torch.device) -> int:
    """Which stream of `place` is its current one; 0 on the CPU."""
    import torch

    if place.type == "cpu":
        return 0
    return int(torch.accelerator.current_stream(place).stream_id)


class Graphs:
    """Captures on one NVIDIA device, the current one of each call, where `run` computes.

    What it captures replays in order, on one stream, and shares memory and what kernels keep for a
    stream: workspaces, counters. Another one's shares neither, and may run meanwhile.
    """

    def __init__(self) -> None:
        self._aside: Any = None
        self._pool: Any = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """What repeats `run`, and its output, which each repetition overwrites, and others may.

        `run` reads and writes tensors that stay where they are, and never waits for the host. It
        runs twice before, so that kernels are built and workspaces made.
        """
        import torch

        if self._aside is None:
            self._aside, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        self._aside.wait_stream(here)
        try:
            with torch.cuda.stream(self._aside):
                for _ in range(2):
                    run()
        finally:
            here.wait_stream(self._aside)
        try:
            output = self._captured(graph, run)
        except BaseException:
            self._recover(here)
            raise
        return graph.replay, output

    def _captured(self, graph: Any, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        import torch

        # On the stream of the runs before: what kernels keep for it is made outside of graphs.
        how = {"pool": self._pool, "stream": self._aside, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, **how):
            return run()

    def _recover(self, here: Any) -> None:
        """Ends what torch leaves open where the end of a capture fails: its stream is the current
        one, its pool takes what is allocated, and no capture may begin with that pool. Torch 2.11
        then refuses to draw random numbers too, until a capture ends well, as a small one does."""
        import torch

        self._close(here)
        try:
            nothing = torch.zeros((), device=accelerator())
            self._captured(torch.cuda.CUDAGraph(), lambda: nothing.add_(0))
        except RuntimeError:
            self._close(here)
        self._pool = torch.cuda.graph_pool_handle()  # that of the small graph went with it

    def _close(self, here: Any) -> None:
        import torch

        torch.cuda.set_stream(here)
        index, pool = torch.cuda.current_device(), self._pool
        with suppress(RuntimeError):  # it was ended
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
        self._pool = torch.cuda.graph_pool_handle()


def backend_for(kind: str | None) -> str:
    """The collective backend that belongs to a kind of accelerator."""
    return {"cuda": "nccl", "xpu": "xccl", "npu": "hccl"}.get(kind or "cpu", "gloo")
