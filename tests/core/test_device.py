"""What is asked of an accelerator, with stubs in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lezero.core import device


class Cuda:
    """torch.cuda whose captures are noted, and end as torch's do: where the end fails, nothing is
    put back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: Any = "the caller's"
        self.captured = list[tuple[Any, Any]]()
        self.recording, self.held = set[Any](), list[Any]()
        self.fails, self.draws = 0, True
        """How many captures fail from now on; whether random numbers are drawn."""
        for name, stub in {
            "current_device": lambda: 1,
            "current_stream": lambda: SimpleNamespace(name=self.current, wait_stream=id),
            "Stream": lambda: SimpleNamespace(name=object(), wait_stream=id),
            "stream": lambda stream: nullcontext(),
            "set_stream": lambda stream: setattr(self, "current", stream.name),
            "graph_pool_handle": lambda: object(),
            "CUDAGraph": lambda: SimpleNamespace(replay=None),
            "graph": self._graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stub)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self._release)

    @contextmanager
    def _graph(
        self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        before, self.current = self.current, stream.name
        assert pool not in self.recording, "already recording to mempool_id"
        self.recording.add(pool)
        self.held.append(pool)
        try:
            yield
        finally:
            self.draws = not self.fails
            if self.fails:
                self.fails -= 1
                raise torch.AcceleratorError("operation failed due to a previous error", 901)
            self._end(1, pool)
            self.captured.append((pool, stream.name))
            self.current = before

    def _end(self, index: int, pool: Any) -> None:
        if pool not in self.recording:
            raise RuntimeError("not currently recording to mempool_id")
        self.recording.remove(pool)

    def _release(self, index: int, pool: Any) -> None:
        self.held.remove(pool)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_graphs_share_a_stream_and_memory_with_those_of_the_same_program_only(cuda: Cuda) -> None:
    one, other = device.Graphs(), device.Graphs()
    for graphs in (one, other, one):
        graphs(lambda: torch.zeros(1))
    first, second, third = cuda.captured
    assert first == third
    assert all(mine is not theirs for mine, theirs in zip(first, second, strict=True))


@pytest.mark.parametrize("fails", [1, 2])
def test_captures_go_on_after_one_that_failed(fails: int, cuda: Cuda) -> None:
    """The second is the small one, after which random numbers are drawn again."""
    graphs = device.Graphs()
    graphs(lambda: torch.zeros(1))
    cuda.fails = fails
    with pytest.raises(torch.AcceleratorError):
        graphs(lambda: torch.zeros(1))
    assert (cuda.current, cuda.draws, cuda.recording) == ("the caller's", fails == 1, set())
    assert cuda.held == [pool for pool, _ in cuda.captured]
    graphs(lambda: torch.zeros(1))
    pools = [pool for pool, _ in cuda.captured]
    assert len(set(pools)) == len(pools) == 4 - fails
    assert len({stream for _, stream in cuda.captured}) == 1


def test_a_run_that_fails_within_a_capture_leaves_nothing_open(cuda: Cuda) -> None:
    runs = iter(range(9))

    def third() -> torch.Tensor:
        if next(runs) == 2:
            raise ZeroDivisionError
        return torch.zeros(1)

    graphs = device.Graphs()
    with pytest.raises(ZeroDivisionError):
        graphs(third)
    graphs(third)
    assert (cuda.current, cuda.recording) == ("the caller's", set())


def test_a_device_is_the_current_one_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int | None] = []

    @contextmanager
    def index(given: int | None) -> Iterator[None]:
        entered.append(given)
        yield

    monkeypatch.setattr(torch.accelerator, "device_index", index)
    for place in ("cpu", "cuda:1"):
        with device.using(torch.device(place)):
            pass
    assert entered == [1]


def test_mps_is_asked_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("Allocator for mps is not a DeviceAllocator.")

    monkeypatch.setattr(device, "accelerator", lambda: "mps")
    for name in dir(torch.accelerator):
        if "memory" in name or name == "empty_cache":
            monkeypatch.setattr(torch.accelerator, name, fails)
    emptied: list[bool] = []
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 50)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 20)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: emptied.append(True))
    device.reset_peak()
    device.empty_cache()
    assert emptied
    assert (device.memory_free(), device.memory_free(torch.device("mps", 0))) == (30, 30)
    assert (device.memory_allocated(), device.max_memory_allocated()) == (20, 0)


def test_whether_an_accelerator_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, begun in ((None, True), ("cuda", False), ("cuda", True), ("mps", False)):
        monkeypatch.setattr(device, "accelerator", lambda kind=kind: kind)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda begun=begun: begun)
        assert device.is_initialized() == (kind is not None and (begun or kind == "mps"))


def test_doubles_are_computed_where_they_are() -> None:
    here = torch.zeros(2)
    assert device.with_doubles(here) is here
    there: Any = SimpleNamespace(device=torch.device("mps"), cpu=lambda: here)
    assert device.with_doubles(there) is here


def test_each_device_that_is_named_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda place: waited.append(str(place)))
    device.synchronize(map(torch.device, ["cuda:1", "cpu", "cuda:0", "cuda:1", "meta"]))
    assert sorted(waited) == ["cuda:0", "cuda:1"]
    device.synchronize([torch.device("cpu")])
    device.synchronize()
    assert waited[2:] == ["cuda"]


@pytest.mark.parametrize(("kind", "waits"), [("cuda", False), ("mps", True)])
def test_only_cuda_copies_what_is_sent_before_it_goes_on(kind: str, waits: bool) -> None:
    sent: list[tuple[str, bool]] = []
    numbers: Any = SimpleNamespace(to=lambda at, non_blocking: sent.append((at.type, non_blocking)))
    device.sent(numbers, torch.device(kind))
    assert sent == [(kind, not waits)]


def test_free_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    for name, by_index in {
        "memory_reserved": {None: 5, 1: 50},
        "memory_allocated": {None: 3, 1: 30},
        "get_memory_info": {None: (1, 9), 1: (100, 900)},
    }.items():
        monkeypatch.setattr(
            torch.accelerator, name, lambda place, of=by_index: of[place and place.index]
        )
    assert device.memory_free() == 3
    assert device.memory_free(torch.device("cuda:1")) == 120


def test_seeding_writes_down_no_stack(monkeypatch):
    """As `torch.manual_seed` does for each kind of accelerator that there is not."""
    asked = []
    monkeypatch.setattr("traceback.format_stack", lambda *_: asked.append(1) or [])
    with torch.random.fork_rng():
        device.seed(5)
        mine = torch.rand(3)
        assert not asked
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3), mine)
