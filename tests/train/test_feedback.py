"""What encoding lost, through a checkpoint: over another topology, and back to an earlier state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lezero.comm import routing
from lezero.comm.feedback import WORKER, Feedback
from lezero.comm.route import Span
from lezero.comm.topology import Hosts
from lezero.comm.wire import Wire
from lezero.train.gradients import wires
from lezero.train.loss import next_token_loss
from tests.train.test_zero import errors, global_batches, make, mine, steps


def over(topology, folder, load):
    """What four ranks on two hosts keep, after three steps or after loading."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "find_hosts", lambda group: Hosts(((0, 1), (2, 3))))
        wire = Wire(codec="int4", feedback="worker", topology=topology)
        engine = make(2, torch.float32, wire=wire)
    if load:
        engine.load(folder)
    else:
        steps(engine, count=3)
        engine.save(folder)
    return errors(engine)


@pytest.mark.parametrize(
    ("before", "after", "times"), [("flat", "hierarchical", 2), ("hierarchical", "flat", 1)]
)
def test_pending_errors_survive_another_topology(ranks, tmp_path, before, after, times):
    saved = ranks(4, over, before, tmp_path, False)
    total: dict[tuple[str, str], np.ndarray] = {}
    for key, value in (item for rank in saved for item in rank.items()):
        total[key] = total.get(key, 0) + value.astype(np.float64)
    assert any(value.any() for value in total.values())
    for loaded in ranks(4, over, after, tmp_path, True):
        for key, value in total.items():
            assert np.array_equal(loaded[key], (value * times / 4).astype(np.float32)), key


def back(folder):
    engine = make(2, torch.float32, wire=Wire(codec="int4", feedback="worker"))
    engine.save(folder)
    steps(engine, count=3)
    assert any(value.any() for value in errors(engine).values())
    engine.load(folder)
    return errors(engine)


def test_an_earlier_state_drops_what_later_steps_have_kept(ranks, tmp_path):
    assert ranks(2, back, tmp_path) == [{}, {}]


def split(rank, old):
    """Of eight elements of "w", those that a rank of two hosts sends, and where the buffer of all
    lies; other buffers give other ranks of the host other ones."""
    low = rank % 2 == 0
    if old:
        return (Span("w", 0, 4, 0),) if low else (Span("w", 4, 8, 0),)
    return (Span("w", 0, 2, 0), Span("w", 6, 8, 2)) if low else (Span("w", 2, 6, 0),)


def hosts_errors(states):
    """By host, what its ranks keep of "w"; each element once."""
    found = [np.full(8, np.nan) for _ in range(2)]
    for rank, state in enumerate(states):
        for key, data in state.items():
            start = int(key.rsplit("/", 1)[1])
            part = found[rank // 2][start : start + len(data)]
            assert np.isnan(part).all(), key
            part[:] = data.numpy()
    return found


def test_another_rank_of_the_host_sends_what_was_not_its_own():
    device = torch.device("cpu")
    before = [Feedback(rank, 4, "fp32", device, 2) for rank in range(4)]
    for rank, one in enumerate(before):
        one.error(WORKER, "old", 4, split(rank, True)).copy_(torch.arange(4) + 10.0 * rank + 1)
    states = [one.state_dict() for one in before]
    after = [Feedback(rank, 4, "fp32", device, 2) for rank in range(4)]
    for one in after:
        one.load_state_dict(states)
    again = [one.state_dict() for one in after]
    assert [list(one) for one in again] == [list(one) for one in states]  # each saves its own
    for rank, one in enumerate(after):
        one.error(WORKER, "new", 4, split(rank, False))
        one.leave((Span("w", 0, 8, 0),))
    wanted, found = hosts_errors(states), hosts_errors([one.state_dict() for one in after])
    assert all(np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))


def both(folder, load):
    engine = make(0, torch.float32, wire=Wire(codec="int4", feedback="both", topology="flat"))
    if load:
        engine.load(folder)
    else:
        steps(engine, count=3)
        engine.save(folder)
    feedback = wires(engine.model)["replicate"].feedback
    return {k: v.numpy() for k, v in feedback.state_dict().items() if k.startswith("server")}


def test_every_rank_is_given_what_all_servers_owe(ranks, tmp_path):
    saved = ranks(2, both, tmp_path, False)
    total: dict[str, np.ndarray] = {}
    for key, value in (item for rank in saved for item in rank.items()):
        name, start = key.split("/", 1)[1].rsplit("/", 1)
        whole = total.setdefault(name, np.zeros(1 << 16, np.float32))
        whole[int(start) : int(start) + len(value)] = value
    assert any(value.any() for value in total.values())
    for loaded in ranks(2, both, tmp_path, True):
        found = {key.split("/", 1)[1].rsplit("/", 1)[0]: value for key, value in loaded.items()}
        assert found.keys() == total.keys()
        assert all(np.array_equal(x, total[name][: len(x)]) for name, x in found.items())


def after_a_skip(codec, feedback):
    """The largest error that is owed before and after a step of an infinite loss, and the
    largest norm behind it."""
    factor = 1.0
    wire = Wire(codec=codec, feedback=feedback, topology="flat")
    engine = make(2, torch.float32, wire=wire, loss=lambda *x: factor * next_token_loss(*x))
    engine.logs_skipped = False
    steps(engine, count=2)

    def most():
        return max(float(np.abs(value).max()) for value in errors(engine).values())

    before, factor = most(), 3e38  # an infinite loss, whose gradients are not
    assert engine.train_step(mine(next(iter(global_batches(1))))).skipped
    after, factor = most(), 1.0
    norms = [engine.train_step(mine(batch)).grad_norm for batch in global_batches(3)]
    return before, after, max(norms)


@pytest.mark.parametrize(("codec", "feedback"), [("int4", "both"), ("int8", "worker")])
def test_nothing_is_owed_of_a_step_that_was_skipped(ranks, codec, feedback):
    for before, after, norm in ranks(2, after_a_skip, codec, feedback):
        assert before > 0
        assert after == 0
        assert norm < 100
