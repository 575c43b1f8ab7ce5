"""What codec auto counts as the time of a step, and how often it looks, on a clock that it is
given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lezero.comm import chooser
from lezero.comm.chooser import EVERY, MEASURED, WARM
from lezero.comm.link import Link
from lezero.comm.mesh import Mesh
from lezero.comm.owed import Errors
from lezero.comm.probe import Level, Topology
from lezero.comm.topology import Hosts
from lezero.comm.wire import Wire
from lezero.core import groups
from tests.ranks import RankPool

RESULT = Topology(Hosts(((0,), (1,))), (Level("network", 1e-6, 1.0),))


class Clock:
    """Stands for `time`. Looking at a gradient takes 7 s and finds nothing, so that no codec is
    chosen; probing takes 20 s, and 30 s on rank 0."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr(chooser, "time", self)
        patch.setattr(chooser, "probe", self._probe)
        patch.setattr(Errors, "note", self._note)

    def perf_counter(self) -> float:
        return self.now

    def _probe(self, mesh: Mesh, axis: str) -> Topology:
        self.now += 20 if groups.rank() else 30
        return RESULT

    def _note(self, key: str, flat: torch.Tensor) -> None:
        self.now += 7


def looked(took: list[float], waited: list[float]) -> tuple[float, float, int]:
    """Seconds of a step and those that it stood still, as recorded after steps that took so long,
    times the rank plus 1, and how many steps later it looks again."""
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        with Link(Wire(codec="auto", topology="flat"), Mesh({"s": 2}), "s") as link:
            assert link.chooser is not None
            queue = SimpleNamespace(waited_s=0.0)
            patch.setattr(link.chooser, "_queue", queue)
            for step_s, waited_s in zip(took, waited, strict=True):
                link.all_reduce(torch.ones(64), key="x").wait()
                clock.now += step_s * (link.rank + 1)
                queue.waited_s += waited_s * (link.rank + 1)
                link.step_done()
            plain = link.chooser.decisions.records["wire.s"].candidates["none"]
            return plain["s"], plain["stood still s"], link.chooser._due - link.chooser._step


def test_the_slowest_rank_counts_and_of_waits_the_shortest(ranks: RankPool) -> None:
    """Not the first step, nor what it takes to look at the gradients."""
    assert WARM + MEASURED == 4
    for step_s, waited_s, _ in ranks(2, looked, [90.0, 1.0, 2.0, 3.0], [50.0, 0.1, 0.2, 0.3]):
        assert step_s == pytest.approx(2 * 2.0)
        assert waited_s == pytest.approx(0.2)


@pytest.mark.parametrize(("step_s", "steps"), [(0.5, 30 * 100), (50.0, EVERY)])
def test_probing_takes_one_percent_of_the_time_on_all_ranks_at_once(
    ranks: RankPool, step_s: float, steps: int
) -> None:
    for *_, wait in ranks(2, looked, [step_s] * 4, [0.0] * 4):
        assert wait == pytest.approx(steps, abs=1)


def looked_twice() -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chooser, "EVERY", MEASURED)
        clock, found = Clock(patch), []
        with Link(Wire(codec="auto", topology="flat"), Mesh({"s": 2}), "s") as link:
            assert link.chooser is not None
            for step_s, steps in ((2000.0, WARM + MEASURED), (3000.0, MEASURED)):
                for _ in range(steps):
                    link.all_reduce(torch.ones(64), key="x").wait()
                    clock.now += step_s
                    link.step_done()
                found.append(link.chooser.decisions.records["wire.s"].candidates["none"]["s"])
    return found


def test_without_a_codec_the_step_is_measured_anew_when_it_looks_again(ranks: RankPool) -> None:
    assert ranks(2, looked_twice) == [[2000.0, 3000.0]] * 2
