"""What encoding lost, through a checkpoint: over another topology, and back to an earlier state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lezero.comm import routing
from lezero.comm.topology import Hosts
from lezero.comm.wire import Wire
from tests.train.test_zero import errors, make, steps


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
