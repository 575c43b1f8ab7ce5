"""What a checkpoint is given of kept errors: few tensors, and views where nothing is to be done."""

from __future__ import annotations

import pytest
import torch

from lezero.comm.feedback import WORKER, Feedback
from lezero.comm.link import Link
from lezero.comm.mesh import Mesh
from lezero.comm.wire import Wire
from lezero.core import groups
from lezero.parallel.zero.layout import Layout
from tests.ranks import RankPool

CPU = torch.device("cpu")
RANKS = 64
LARGE = Layout.of([("large", (130, 8))], RANKS)  # three rows a rank, and ranks without any
SMALL = Layout.of([("norm", (64,)), ("bias", (100,)), ("scale", ())], RANKS)


def kept(dtype: str) -> tuple[Feedback, dict[str, torch.Tensor]]:
    """What rank 3 keeps of a large parameter and of small ones that lie in one buffer, and the
    same by name."""
    feedback, named = Feedback(3, RANKS, dtype, CPU), {}
    for key, layout in (("one", LARGE), ("many", SMALL)):
        error = feedback.error(WORKER, key, layout.numel, layout.spans())
        error.copy_(torch.randint(-127, 128, (layout.numel,)))
        feedback.keep(WORKER, key, error)
        error = feedback.error(WORKER, key, layout.numel, layout.spans()).float()
        for name in {place.name for place in layout.places}:
            spans = [span for span in layout.spans() if span.name == name]
            named[name] = torch.cat([error[s.at : s.at + s.stop - s.start] for s in spans])
    return feedback, named


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_parameter_is_one_tensor_however_many_ranks_there_are(dtype: str) -> None:
    feedback, named = kept(dtype)
    state = feedback.state_dict()
    assert {key.split("/")[1]: key for key in state}.keys() == named.keys()
    assert len(state) == len(named)
    for key, data in state.items():
        assert torch.equal(data.float(), named[key.split("/")[1]])
    again = Feedback(3, RANKS, "fp32", CPU)
    again.load_state_dict([state if rank == 3 else {} for rank in range(RANKS)])
    for layout in (LARGE, SMALL):
        error = again.error(WORKER, "k", layout.numel, layout.spans())
        for span in layout.spans():
            found = error[span.at : span.at + span.stop - span.start]
            assert torch.equal(found, named[span.name][span.start : span.stop])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_large_parameter_is_not_copied(dtype: str) -> None:
    feedback, _ = kept(dtype)
    place = feedback.error(WORKER, "one", LARGE.numel, LARGE.spans()).data_ptr()
    assert feedback.state_dict()[f"worker:1:{RANKS}/large/0"].data_ptr() == place


def test_a_state_of_a_tensor_for_each_piece_still_loads() -> None:
    feedback, named = kept("fp32")
    pieces = {
        f"worker:1:{RANKS}/{span.name}/{span.start}": named[span.name][span.start : span.stop]
        for span in (*LARGE.spans(), *SMALL.spans())
    }
    now, before = Feedback(0, 5, "fp32", CPU), Feedback(0, 5, "fp32", CPU)
    now.load_state_dict([feedback.state_dict()] * RANKS)
    before.load_state_dict([pieces] * RANKS)
    states = now.state_dict(), before.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def owed() -> tuple[list[float], list[float]]:
    """What is owed before and after sums that nobody is to remember."""
    wire = Wire(codec="int4", feedback="both", topology="flat")
    with Link(wire, Mesh({"shard": groups.world_size()}), "shard") as link:
        assert link.feedback is not None
        flat, found = torch.arange(64.0), []
        link.all_reduce(flat.clone(), key="k").wait()
        found.append([float(x.abs().sum()) for x in link.feedback.state_dict().values()])
        with link.untouched():
            for key in ("k", "new"):
                link.all_reduce(flat.clone(), key=key).wait()
        found.append([float(x.abs().sum()) for x in link.feedback.state_dict().values()])
        return found[0], found[1]


def test_errors_stay_while_a_wire_is_untouched(ranks: RankPool) -> None:
    for before, after in ranks(2, owed):
        assert any(before)
        assert before == after
