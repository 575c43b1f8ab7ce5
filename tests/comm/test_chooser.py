"""Codec auto on real ranks: measured, decided for all at once, replayed, held to what it said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lezero.comm import chooser
from lezero.comm.chooser import MEASURED, REALISED, WARM, Chooser
from lezero.comm.link import Link
from lezero.comm.mesh import Mesh
from lezero.comm.owed import CANDIDATES, Errors
from lezero.comm.probe import Level, Topology
from lezero.comm.topology import Hosts
from lezero.comm.wire import Wire
from lezero.core import groups
from lezero.core.decisions import Decisions
from tests.ranks import RankPool

NUMEL = 1 << 12


def steps(link: Link, count: int) -> list[str]:
    """The codec that each step used; sums of ones are checked as far as the codec is exact."""
    used = []
    for _ in range(count):
        flat = torch.linspace(-1, 1, NUMEL, dtype=torch.float32)
        link.all_reduce(flat, key="x").wait()
        used.append(link.codec)
        link.step_done()
    return used


def test_what_is_looked_at_is_spread_over_the_buffer() -> None:
    """An embedding whose first rows are of tokens that no batch has, but for a few elements."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(1 << 18, generator=generator)
    whole, part, bad = Errors(), Errors(), Errors()
    whole.note("x", flat[: 1 << 14])
    flat[: 1 << 16] = 0
    flat[:100] = 1
    part.note("x", flat)
    bad.note("x", flat)
    bad.note("x", torch.where(flat == 0, torch.inf, flat))  # a step that will be skipped
    bad.note("y", torch.full((100,), torch.nan))
    for name in CANDIDATES:
        (seen, of), (owed, total) = whole.found()[name], part.found()[name]
        assert owed / total == pytest.approx(seen / of, rel=0.1), name
        assert bad.found()[name] == part.found()[name]


def test_a_default_device_does_not_matter() -> None:
    errors, flat = Errors(), torch.randn(100)
    with torch.device("meta"):
        errors.note("x", flat)
    assert all(owed >= 0 and total > 0 for owed, total in errors.found().values())


def slow_network(monkeypatch: pytest.MonkeyPatch, step_s: list[float]) -> None:
    """A wire that took most of the measured steps; later steps take what `step_s` says in turn."""
    level = Level("network", 1e-6, 1e3)
    found = Topology(Hosts(((0,), (1,))), (level,))
    monkeypatch.setattr(chooser, "probe", lambda mesh, axis: found)
    monkeypatch.setattr(Chooser, "_measured", lambda self: (step_s.pop(0), 18.0))


def chosen(later_s: float) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        slow_network(patch, [20.0, later_s])
        with Link(Wire(codec="auto", topology="flat"), Mesh({"s": 2}), "s") as link:
            assert link.chooser is not None
            before = steps(link, WARM + MEASURED)
            after = steps(link, REALISED + 3)
            record = link.chooser.decisions.to_json()
            first = link.account.take()["all_reduce"]
            flat = torch.full((NUMEL,), 3.0)
            link.all_reduce(flat, key="x").wait()
            sent = link.account.take()["all_reduce"]
            formula = link.sent_bytes("all_reduce", NUMEL, torch.float32)
    assert first > 0
    return {
        "before": before,
        "after": after,
        "record": record["decisions"],
        "bytes": [sent, formula],
        "sum": flat.tolist()[:2],
    }


def test_a_slow_network_gets_a_codec_at_one_step_on_all_ranks(ranks: RankPool) -> None:
    one, two = ranks(2, chosen, 3.0)
    assert one == two
    assert one["before"] == ["none"] * (WARM + MEASURED)
    assert one["after"] == ["int4:64"] * (REALISED + 3)
    (record,) = one["record"]
    assert record["topic"] == "wire.s"
    assert record["chosen"] == "int4:64"
    assert "85% realised over 10 steps" in record["reason"]
    assert "budget" in record["candidates"]["sign:256"]["note"]
    assert record["candidates"]["int4:64"]["realised s"] == 3.0
    assert one["bytes"][0] == one["bytes"][1] < NUMEL


def test_a_codec_that_saves_nothing_is_taken_back(ranks: RankPool) -> None:
    one, two = ranks(2, chosen, 21.0)
    assert one == two
    assert one["after"][: REALISED + 1] == ["int4:64"] * (REALISED + 1)
    assert one["after"][REALISED + 1 :] == ["none"] * 2
    assert "int4:64 saved nothing" in one["record"][0]["reason"]
    assert one["bytes"] == [4 * NUMEL, 4 * NUMEL]
    assert one["sum"] == [6.0, 6.0]  # what was owed went out in the step before


def silent() -> list[Any]:
    """Gradients that are zero at first, on a network where every codec would pay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chooser, "EVERY", MEASURED + 1)
        slow_network(patch, [20.0, 20.0])
        with Link(Wire(codec="auto", topology="flat"), Mesh({"s": 2}), "s") as link:
            assert link.chooser is not None
            for _ in range(WARM + MEASURED):
                link.all_reduce(torch.zeros(NUMEL), key="x").wait()
                link.step_done()
            first = link.chooser.decisions.records["wire.s"]
            used = steps(link, MEASURED + 2)
    return [first.chosen, first.candidates["int4:64"]["note"], used[-2:]]


def test_errors_are_measured_once_there_are_gradients(ranks: RankPool) -> None:
    for made, note, used in ranks(2, silent):
        assert made == "none"
        assert "not measured" in note
        assert used == ["none", "int4:64"]


def exchange(link: Link, values: torch.Tensor) -> torch.Tensor:
    """The sum of `values`, one row a rank."""
    flat = values[groups.rank()].clone()
    link.all_reduce(flat, key="x").wait()
    link.step_done()
    return flat


def owed(skipped: int) -> float:
    """How far sums over all steps are off, with a codec in the middle; the first `skipped` steps
    after it are not finite, and not counted."""
    with pytest.MonkeyPatch.context() as patch:
        slow_network(patch, [20.0, 21.0])
        with Link(Wire(codec="auto", topology="flat"), Mesh({"s": 2}), "s") as link:
            assert link.feedback is not None
            off = torch.zeros(NUMEL)
            generator = torch.Generator().manual_seed(0)
            for _ in range(WARM + MEASURED + REALISED + 1):
                values = torch.randn(2, NUMEL, generator=generator)
                off += exchange(link, values) - values.sum(0)
            assert off.abs().max() > 0.01
            for _ in range(skipped):
                assert exchange(link, torch.full((2, NUMEL), torch.nan)).isnan().all()
            values = torch.randn(2, NUMEL, generator=generator)
            off += exchange(link, values) - values.sum(0)
            assert not link.feedback.holds(), "its memory was given back"
            values = torch.ones(2, NUMEL)
            assert torch.equal(exchange(link, values), values.sum(0))
            assert not link.feedback.holds()
    return float(off.abs().max())


@pytest.mark.parametrize("skipped", [0, 2])
def test_going_back_adds_what_is_still_owed(ranks: RankPool, skipped: int) -> None:
    assert max(ranks(2, owed, skipped)) < 1e-4


def interrupted(topology: str, replayed: bool) -> float:
    """A codec is taken back, a checkpoint follows, and another process goes on from it over
    `topology`, with or without the decision."""
    off, generator = torch.zeros(NUMEL), torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        slow_network(patch, [20.0, 21.0])
        with Link(Wire(codec="auto", topology="flat"), Mesh({"s": 2}), "s") as link:
            assert link.chooser is not None
            assert link.feedback is not None
            for _ in range(WARM + MEASURED + REALISED + 1):
                values = torch.randn(2, NUMEL, generator=generator)
                off += exchange(link, values) - values.sum(0)
            assert link.codec == "none"
            record = link.chooser.decisions.to_json()
            states: list[dict[str, torch.Tensor]] = [{}, {}]
            states[link.rank] = link.feedback.state_dict()
    wire = Wire.parse({"codec": "auto", "topology": topology})
    with Link(wire, Mesh({"s": 2}), "s") as link:
        assert link.chooser is not None
        assert link.feedback is not None
        link.feedback.load_state_dict(states)
        if replayed:
            link.chooser.decisions = Decisions.from_json(record)
        for _ in range(2):
            values = torch.randn(2, NUMEL, generator=generator)
            off += exchange(link, values) - values.sum(0)
        assert link.codec == "none"
        assert not link.feedback.holds()
    return float(off.abs().max())


@pytest.mark.parametrize("topology", ["flat", "shared"])
@pytest.mark.parametrize("replayed", [True, False])
def test_what_is_owed_goes_out_after_a_resume_too(
    ranks: RankPool, topology: str, replayed: bool
) -> None:
    assert max(ranks(2, interrupted, topology, replayed)) < 1e-4


def gathered(gather: str) -> dict[str, Any]:
    """What a slow network's decision says where parameters are gathered too."""
    with pytest.MonkeyPatch.context() as patch:
        slow_network(patch, [20.0])
        wire = Wire.parse({"codec": "auto", "gather": gather, "topology": "flat"})
        with Link(wire, Mesh({"s": 2}), "s") as link:
            assert link.chooser is not None
            for _ in range(WARM + MEASURED):
                whole, part = torch.linspace(-1, 1, NUMEL), torch.empty(NUMEL // 2)
                link.reduce_scatter(whole, part, key="x").wait()
                link.all_gather(part, whole, key="x").wait()
                link.step_done()
            (record,) = link.chooser.decisions.to_json()["decisions"]
    return dict(record)


def test_it_tells_what_encoded_parameters_would_save(ranks: RankPool) -> None:
    record, _ = ranks(2, gathered, "none")
    seconds = {name: figures["s"] for name, figures in record["candidates"].items()}
    assert record["chosen"] == "int4:64"
    assert seconds["gather int8:256"] < seconds["gather bf16"] < seconds["int4:64"]
    assert "wire.gather" in record["candidates"]["gather bf16"]["note"]
    record, _ = ranks(2, gathered, "bf16")
    assert not any(name.startswith("gather") for name in record["candidates"])


def evaluated(gathers: int) -> list[Any]:
    """The figures of a decision before whose last step parameters were gathered so often."""
    with pytest.MonkeyPatch.context() as patch:
        slow_network(patch, [20.0])
        with Link(Wire(codec="auto", topology="flat"), Mesh({"s": 2}), "s") as link:
            assert link.chooser is not None
            steps(link, WARM + MEASURED - 1)
            for _ in range(gathers):
                link.all_gather(torch.empty(NUMEL // 2), torch.empty(NUMEL), key="x").wait()
            steps(link, 1)
            made = link.chooser.decisions.records["wire.s"]
    return [made.candidates["none"]["wire s"], sorted(made.candidates)]


def test_an_evaluation_between_steps_does_not_count(ranks: RankPool) -> None:
    assert ranks(2, evaluated, 50) == ranks(2, evaluated, 0)


def replayed() -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        slow_network(patch, [20.0, 3.0])
        with Link(Wire(codec="auto", topology="flat"), Mesh({"s": 2}), "s") as link:
            assert link.chooser is not None
            steps(link, WARM + MEASURED)
            record = link.chooser.decisions.to_json()
    with Link(Wire(codec="auto", topology="flat"), Mesh({"s": 2}), "s") as link:
        assert link.chooser is not None
        link.chooser.decisions = Decisions.from_json(record)
        used = steps(link, 2)
        used += steps(link, WARM + MEASURED)[
            -1:
        ]  # a measured step would not be one without a codec
        made = link.chooser.decisions.records["wire.s"]
    return [used, made.replayed, made.chosen]


def over_budget() -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        slow_network(patch, [20.0])
        with Link(Wire(codec="auto", topology="flat"), Mesh({"s": 2}), "s") as link:
            assert link.chooser is not None
            steps(link, WARM + MEASURED)
            record = link.chooser.decisions.to_json()
    with Link(Wire(codec="auto", topology="flat", budget=0.01), Mesh({"s": 2}), "s") as link:
        assert link.chooser is not None
        link.chooser.decisions = Decisions.from_json(record)
        used = steps(link, 1)
        return [used, link.chooser.decisions.records["wire.s"].reason]


def test_a_resumed_run_begins_with_what_it_had_chosen(ranks: RankPool) -> None:
    assert ranks(2, replayed) == [[["int4:64"] * 3, True, "int4:64"]] * 2


def test_a_smaller_budget_measures_anew(ranks: RankPool) -> None:
    for used, reason in ranks(2, over_budget):
        assert used == ["none"]
        assert reason.startswith("measured anew: int4:64 owes 0."), reason
        assert reason.endswith("of a gradient; wire.budget is 0.01")


def elsewhere() -> list[Any]:
    """A run whose codec was chosen with four ranks, and that two go on with."""
    off, used, generator = torch.zeros(NUMEL), [], torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        slow_network(patch, [20.0, 10.0])
        with Link(Wire(codec="auto", topology="flat"), Mesh({"s": 2}), "s") as link:
            assert link.chooser is not None
            assert link.feedback is not None
            for _ in range(WARM + MEASURED + 2):
                values = torch.randn(2, NUMEL, generator=generator)
                off += exchange(link, values) - values.sum(0)
            assert link.codec == "int4:64"
            record = link.chooser.decisions.to_json()
            states: list[dict[str, torch.Tensor]] = [{}, {}]
            states[link.rank] = link.feedback.state_dict()
        figures = record["decisions"][0]["candidates"]["none"]
        assert figures["measured with"] == "2 ranks, flat"
        figures["measured with"] = "4 ranks, flat"
        with Link(Wire(codec="auto", topology="flat"), Mesh({"s": 2}), "s") as link:
            assert link.chooser is not None
            assert link.feedback is not None
            link.feedback.load_state_dict(states)
            link.chooser.decisions = Decisions.from_json(record)
            for _ in range(WARM + MEASURED):
                values = torch.randn(2, NUMEL, generator=generator)
                off += exchange(link, values) - values.sum(0)
                made = link.chooser.decisions.records["wire.s"]
                used.append((made.chosen, made.reason, made.candidates.get("none")))
    return [float(off.abs().max()), used]


def test_other_ranks_measure_anew(ranks: RankPool) -> None:
    for off, used in ranks(2, elsewhere):
        assert off < 1e-4, "what the codec owed has gone out"
        told = "measured anew: int4:64 was chosen with 4 ranks, flat, not 2 ranks, flat"
        assert used[:-1] == [("none", told, None)] * (WARM + MEASURED - 1)
        assert used[-1][0] == "int4:64"
        assert used[-1][2]["s"] == 10.0


def from_memory() -> list[Any]:
    """A run whose ranks shared memory, gone on with over a slow network; with older records too."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        slow_network(patch, [20.0, 20.0])
        with Link(Wire(codec="auto"), Mesh({"s": 2}), "s") as link:
            steps(link, WARM + MEASURED)
            assert link.chooser is not None
            record = link.chooser.decisions.to_json()
        for told in (True, False):
            if not told:
                record["decisions"][0]["candidates"] = {}
            with Link(Wire(codec="auto", topology="flat"), Mesh({"s": 2}), "s") as link:
                assert link.chooser is not None
                link.chooser.decisions = Decisions.from_json(record)
                found.append(steps(link, WARM + MEASURED + 1)[-1])
    return found


def test_ranks_that_no_longer_share_memory_measure_anew(ranks: RankPool) -> None:
    assert ranks(2, from_memory) == [["int4:64", "int4:64"]] * 2


def at_home(topology: str, dtype: str) -> list[Any]:
    wire = Wire.parse({"codec": "auto", "topology": topology})
    with Link(wire, Mesh({"s": 2}), "s") as link:
        assert link.chooser is not None
        for _ in range(WARM + MEASURED + 2):
            link.all_reduce(torch.ones(NUMEL, dtype=getattr(torch, dtype)), key="x").wait()
            link.step_done()
        made = link.chooser.decisions.records["wire.s"]
        return [link.topology, link.codec, made.chosen, made.reason]


def test_nothing_pays_on_one_host(ranks: RankPool) -> None:
    for topology, codec, made, reason in ranks(2, at_home, "auto", "float32"):
        assert (topology, codec, made) == ("shared", "none", "none")
        assert "no byte travels" in reason
    for _, codec, made, reason in ranks(2, at_home, "flat", "float64"):
        assert (codec, made) == ("none", "none")
        assert "fp64" in reason


def really_measured(default: torch.dtype) -> list[Any]:
    torch.set_default_dtype(default)
    with Link(Wire(codec="auto", topology="flat"), Mesh({"s": 2}), "s") as link:
        assert link.chooser is not None
        steps(link, WARM + MEASURED)
        made = link.chooser.decisions.records["wire.s"]
        return [made.chosen, {name: dict(f) for name, f in made.candidates.items()}]


@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=str)
def test_all_is_measured_on_a_real_wire(ranks: RankPool, default: torch.dtype) -> None:
    one, two = ranks(2, really_measured, default)
    assert one == two
    assert set(one[1]) == {"none", *CANDIDATES}
    assert all(figures["s"] > 0 for figures in one[1].values())
