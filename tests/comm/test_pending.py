"""The queue of collectives in flight, with steps of our own in one process."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from lezero.comm import pending
from lezero.comm.link import Link
from lezero.comm.mesh import Mesh
from lezero.comm.pending import Call, Pending, Queue, Steps
from lezero.comm.wire import Wire
from lezero.core.errors import DistributedError

CPU = torch.device("cpu")
CALL = Call("all_reduce", (4,), torch.float32, "x")


class Later:
    """What is waited for, and comes when it is told."""

    come = False

    def done(self) -> bool:
        return self.come

    def block(self, deadline: float) -> None:
        assert self.come


def test_an_interrupted_step_is_not_taken_for_the_last_one() -> None:
    waits, queue = Later(), Queue(1.0, CPU)

    def steps() -> Steps:
        yield waits
        raise KeyboardInterrupt

    pending = queue.launch(steps(), CALL)
    waits.come = True
    with pytest.raises(KeyboardInterrupt):
        pending.poll()
    with pytest.raises(DistributedError, match="failed before: KeyboardInterrupt"):
        pending.wait()
    assert not pending.finished
    with pytest.raises(DistributedError, match="failed before"):
        queue.launch(steps(), CALL)


class Comes(Later):
    """Comes when it is waited for."""

    def block(self, deadline: float) -> None:
        self.come = True


def test_of_too_many_in_flight_the_oldest_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "IN_FLIGHT", 2)
    waits, queue = [Comes() for _ in range(4)], Queue(1.0, CPU)
    launched = [queue.launch(iter([wait]), CALL) for wait in waits]  # type: ignore[arg-type]
    assert [one.finished for one in launched] == [True, True, False, False]
    queue.drain()
    assert all(one.finished for one in launched)


def test_steps_are_taken_without_autograd() -> None:
    def steps() -> Steps:
        flat.mul_(2)
        yield from ()

    flat = torch.ones(4, requires_grad=True)
    Queue(1.0, CPU).launch(steps(), CALL).wait()
    assert flat.tolist() == [2.0] * 4


class Stream:
    """Stands for a stream of an accelerator, and for the event that was recorded last."""

    device, done = CPU, False

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Stream) -> None:
        pass

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        return self.done


def test_what_a_stream_uses_lives_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {"current": Stream()}
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: streams["current"])
    queue, side = Queue(1.0, CPU), Stream()
    queue._stream = side  # type: ignore[assignment]

    def launched() -> tuple[Pending, weakref.ref[torch.Tensor]]:
        flat = torch.ones(4)

        def steps() -> Steps:
            flat.mul_(2)
            yield from ()

        return queue.launch(steps(), CALL, flat), weakref.ref(flat)

    polled, first = launched()
    assert not polled.poll()
    assert first() is not None
    side.done = True
    assert polled.poll()
    assert first() is None

    side.done = False
    waited, second = launched()
    of_wait = streams["current"]
    streams["current"] = Stream()
    waited.wait()  # this stream waits, the one that the memory goes back to does not
    assert second() is not None
    streams["current"] = of_wait
    waited.wait()
    assert second() is None


def test_a_link_tells_what_its_collectives_use(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[set[int]] = []
    launch = Queue.launch

    def told(queue: Queue, steps: Steps, call: Call, *tensors: torch.Tensor) -> Any:
        used.append({id(tensor) for tensor in tensors})
        return launch(queue, steps, call, *tensors)

    monkeypatch.setattr(Queue, "launch", told)
    with Link(Wire(), Mesh({"shard": 1}), "shard") as link:
        flat, out = torch.ones(4), torch.empty(4)
        link.reduce_scatter(flat, out, key="a")
        link.all_gather(flat, out, key="b")
        link.all_reduce(flat, key="c")
    assert used == [{id(flat), id(out)}] * 2 + [{id(flat)}]
