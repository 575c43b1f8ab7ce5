"""The queue of collectives in flight, with steps of our own in one process."""

from __future__ import annotations

import pytest
import torch

from lezero.comm.pending import Call, Queue, Steps
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
