"""Codec "auto" at work: what a link measures, when it decides, how it holds itself to it.

The first step of a run is not looked at. The next three run without a codec and give the seconds of
a step, how long it stood still for the wire, which collectives it made, and what each candidate
codec would owe of these very gradients. Then all ranks probe the network, time the codecs, and
`choice` decides, the same on every rank. Ten steps later the predicted time is held against the
real one: a codec that made steps longer is taken back. From then on the network is probed again
now and then. Every switch is at the end of a step, on all ranks together, and on the record.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import replace
from statistics import median, median_low
from typing import TYPE_CHECKING

import torch

from lezero.comm.choice import (
    PLAIN,
    Candidate,
    Choice,
    Exchange,
    Plain,
    Speed,
    Traffic,
    Way,
    choose,
    predict,
)
from lezero.comm.codec import FLOATS, Codec, codec
from lezero.comm.codec_speed import codec_speed
from lezero.comm.mesh import Mesh
from lezero.comm.owed import CANDIDATES, Errors, ratio
from lezero.comm.pending import Queue
from lezero.comm.probe import Topology, probe
from lezero.comm.route import Spans
from lezero.comm.routing import Routing
from lezero.core import groups
from lezero.core.decisions import Decision, Decisions
from lezero.core.log import logger

if TYPE_CHECKING:
    from torch import Tensor

GATHERS = ("bf16", "int8:256")
"""What `wire.gather` could be: foreseen and told, but for the user to choose, since parameters are
used as they arrive."""
WARM, MEASURED, REALISED, EVERY = 1, 3, 10, 200
_FLUSHES = 3  # steps, at most, that add what is owed: one, and more where one was not finite
_WAITED, _WIRE, _OWED = "stood still s", "wire s", "owes"
_PLACE = "measured with"
_SHARE = 0.01  # of the run's time that probing again may take


class Chooser:
    """For one link with codec auto; every rank of the mesh calls the same, in the same order."""

    def __init__(self, mesh: Mesh, axis: str, routing: Routing, queue: Queue, budget: float):
        self.decisions = Decisions()
        """Where choices are recorded and replayed from; a run puts its own here."""
        self.topic = f"wire.{axis}"
        self.codec = PLAIN
        """What is in use."""
        self.steps_of_run: Callable[[], int | None] = lambda: None
        """How many steps the run has ended, for the record; those seen here count where it is over
        or there is none (None)."""
        self.choice: Choice | None = None
        self._mesh, self._axis, self._routing, self._queue = mesh, axis, routing, queue
        self._budget = budget
        hosts = f" on {len(routing.hosts.ranks)} hosts" if routing.hosts.ranks else ""
        self._place = f"{mesh.size(axis)} ranks{hosts}, {routing.topology}"
        # Where nothing can be encoded, nothing is looked at: `Errors` would raise the peak.
        self._errors = Errors() if routing.coded is not None else None
        self._traffic: Counter[Exchange] = Counter()
        self._traffics: deque[Counter[Exchange]] = deque(maxlen=REALISED)
        self._encodable = True
        self._times: deque[tuple[float, float]] = deque(maxlen=REALISED)
        self._began = self._waited = self._own = 0.0
        self._step, self._before, self._due = 0, 0, WARM + MEASURED
        self._plain: Plain | None = None
        self._flushing, self._paying, self._judge = 0, False, False
        self._wait = EVERY
        self._owed: dict[str, float | None] = {}
        self._speeds: dict[str, Speed] = {}
        self._failed: set[str] = set()
        self._gathers: dict[str, float] = {}

    def observe(self, operation: str, key: str, flat: Tensor, spans: Spans = ()) -> None:
        """Before every collective of the link."""
        feedback = self._routing.feedback
        assert feedback is not None
        if self.topic in self.decisions.replay:
            self._count()
            self._replay()
        elif feedback.loaded:
            owing = any(groups.gather_objects(feedback.holds()))
            if self.codec == PLAIN and not self._flushing:
                self._settle(owing)
        feedback.loaded = False
        if self._paying and operation != "all_gather":
            feedback.pay(key, flat, spans)
        began = time.perf_counter()
        self._traffic[Exchange(operation, flat.numel(), flat.dtype.itemsize)] += 1
        if operation != "all_gather":
            self._encodable &= flat.dtype in FLOATS
            soon = 0 < self._due - self._step <= MEASURED
            if self._errors is not None and soon and self._encodable:
                self._errors.note(key, flat)
        self._own += time.perf_counter() - began

    def step_done(self) -> None:
        """Once a step, when its last sums are there."""
        self._count()
        now, waited = time.perf_counter(), self._queue.waited_s
        if self._step >= WARM:
            self._times.append((now - self._began - self._own, waited - self._waited))
            self._traffics.append(self._traffic)
        self._traffic = Counter()
        self._step += 1
        if self._flushing:
            self._flushed()
        if self._paying:
            assert self._routing.feedback is not None
            self._routing.feedback.drop()
            self._paying = False
        if self._step == self._due:
            self._decide()
        self._began, self._waited, self._own = time.perf_counter(), self._queue.waited_s, 0.0

    def _count(self) -> None:
        """Between two steps: how many the run had before the first one here."""
        ended = self.steps_of_run()
        if ended is not None:
            self._before = ended - self._step

    @property
    def _taken(self) -> int:
        """How many steps the run has ended."""
        return self._before + self._step

    def _flushed(self) -> None:
        """A step has added what was owed; where a rank still owes, another one does."""
        assert self._routing.feedback is not None
        owing = any(groups.gather_objects(self._routing.feedback.settle()))
        self._flushing -= 1
        if not owing or not self._flushing:
            self._use(PLAIN, feedback=False)

    def _settle(self, owing: bool) -> None:
        """Without a codec: the next step adds what a checkpoint said that encoding owes."""
        if self._routing.coded is not None:
            self._use(PLAIN, feedback=owing)
        self._paying = owing and self._routing.coded is None

    def _decide(self) -> None:
        if self._routing.coded is None or not self._possible():
            self._errors = None
            reason = "the ranks share one host's memory: no byte travels, so no codec can pay"
            if self._routing.coded is not None:
                reason = "gradients are fp64, which no codec carries"
            figures = {PLAIN: {_PLACE: self._place}}
            self.decisions.record(self.topic, PLAIN, figures, reason, step=self._taken)
            self._due = -1
            return
        step_s, waited_s = self._measured()
        if self._plain is None:
            self._first(step_s, waited_s)
        elif self._judge:
            self._hold(step_s)
        else:
            self._again(step_s, waited_s)

    def _possible(self) -> bool:
        return all(groups.gather_objects(self._encodable))

    def _measured(self) -> tuple[float, float]:
        """Medians of the last steps: seconds of the slowest rank, waited of the one that waited
        least."""
        mine = [median(one[0] for one in self._times), median(one[1] for one in self._times)]
        if self._mesh.kind != "cpu":  # there the stream waits, which nobody sees
            mine[1] = mine[0]
        every = groups.gather_objects(mine)
        self._times.clear()
        return max(one[0] for one in every), min(one[1] for one in every)

    def _first(self, step_s: float, waited_s: float) -> None:
        self._plain = Plain(step_s, waited_s, 0.0)
        self._choose(step_s)

    def _again(self, step_s: float, waited_s: float) -> None:
        assert self._plain is not None
        if self.codec == PLAIN:
            self._plain = Plain(step_s, waited_s, 0.0)
        self._choose(step_s)

    def _choose(self, step_s: float) -> None:
        """Probes, predicts, decides, switches; says when to look next."""
        if self._errors is not None:
            errors = groups.gather_objects(self._errors.found())
            self._owed = {name: ratio([one[name] for one in errors]) for name in CANDIDATES}
            self._errors = self._looks()
        if not self._speeds:
            self._speeds = codec_speeds((*CANDIDATES, "bf16"), self._routing.device)
        began = time.perf_counter()
        way = way_of(probe(self._mesh, self._axis), self._routing.topology, self._routing.gather)
        took = max(groups.gather_objects(time.perf_counter() - began))
        assert self._plain is not None
        traffic = _usual(self._traffics)
        wire_s = way.seconds(traffic, None)
        before = self._plain if self._plain.wire_s else replace(self._plain, wire_s=wire_s)
        self._plain = before.moved(wire_s)
        candidates = [
            Candidate(
                name,
                way.seconds(traffic, codec(name)),
                self._speeds[name].seconds(traffic, way.size, way.partners),
                self._owed[name],
            )
            for name in CANDIDATES
            if name not in self._failed
        ]
        self.choice = choose(self._plain, candidates, self._budget)
        self._gathers = self._with_gathers(way, traffic, self.choice.codec)
        self._switch(self.choice, self.choice.codec, self.choice.reason)
        wait = max(EVERY, int(took / max(_SHARE * step_s, 1e-9)))
        self._judge = self.codec != PLAIN
        self._due = self._step + (REALISED + 1 if self._judge else wait)
        self._wait = wait

    def _looks(self) -> Errors | None:
        """Whether the errors of codecs are still to be measured, and with what."""
        return None if any(owed is not None for owed in self._owed.values()) else Errors()

    def _with_gathers(self, way: Way, traffic: Traffic, chosen: str) -> dict[str, float]:
        """Seconds that a step with codec `chosen` would take with each codec of parameters."""
        assert self._plain is not None
        moved = any(exchange.operation == "all_gather" for exchange in traffic)
        if way.gather is not None or not moved:
            return {}
        used = None if chosen == PLAIN else codec(chosen)
        own = self._speeds[chosen].seconds(traffic, way.size, way.partners) if used else 0.0
        found = {}
        for name in GATHERS:
            wire_s = replace(way, gather=codec(name)).seconds(traffic, used)
            coding = own + self._speeds[name].gathering(traffic, way.size, way.partners)
            found[f"gather {name}"] = predict(self._plain, Candidate(name, wire_s, coding, None))
        return found

    def _hold(self, step_s: float) -> None:
        """The prediction against what came of it."""
        assert self.choice is not None
        assert self._plain is not None
        gain = 1 - step_s / self._plain.step_s
        told = f"{self.choice.gain:.0%} predicted, {gain:.0%} realised over {REALISED} steps"
        if gain > 0:
            self._switch(self.choice, self.codec, f"saves {gain:.0%} of a step ({told})", step_s)
        else:
            self._failed.add(self.codec)
            self._switch(self.choice, PLAIN, f"{self.codec} saved nothing ({told})", step_s)
        self._judge = False
        self._due = self._step + self._wait

    def _switch(
        self, choice: Choice, name: str, reason: str, realised_s: float | None = None
    ) -> None:
        assert self._plain is not None
        figures = choice.figures()
        for each, owed in self._owed.items():
            if each in figures:
                figures[each][_OWED] = owed
        for each, seconds in self._gathers.items():
            figures[each] = {"s": seconds, "note": "for you to choose: wire.gather"}
        plain = self._plain
        figures[PLAIN] |= {_WAITED: plain.waited_s, _WIRE: plain.wire_s, _PLACE: self._place}
        if realised_s is not None:
            figures[self.codec]["realised s"] = realised_s
        name = self.decisions.record(self.topic, name, figures, reason, unit="s", step=self._taken)
        if name != self.codec:
            logger("comm").info(f"{self.topic}: codec {name} from step {self._taken + 1}: {reason}")
            self._use(name)

    def _use(self, name: str, feedback: bool = True) -> None:
        """Going back to no codec, one more step adds the errors that are still owed, exactly."""
        self._flushing = _FLUSHES if name == PLAIN and feedback else 0
        self._routing.use(name, "both" if feedback else "none")
        self.codec = name

    def _replay(self) -> None:
        """A resumed run begins with what it had chosen, and with what a codec still owed. Where the
        ranks and hosts are others, or the budget is too small for it, it measures anew."""
        old = self.decisions.replay[self.topic]
        was = old.candidates.get(PLAIN, {}).get(_PLACE, "ranks that are not recorded")
        owes = old.candidates.get(old.chosen, {}).get(_OWED)
        changed = ""
        if was != self._place:
            changed = f"{old.chosen} was chosen with {was}, not {self._place}"
        elif isinstance(owes, float) and owes > self._budget:
            changed = f"{old.chosen} owes {owes:.2g} of a gradient; wire.budget is {self._budget:g}"
        held = self._routing.feedback is not None and self._routing.feedback.holds()
        changed = next(filter(None, groups.gather_objects(changed)), "")
        owing = any(groups.gather_objects(held))
        self._due, self._judge = self._step + EVERY, False
        if not changed:
            self.decisions.record(self.topic, old.chosen)
        del self.decisions.replay[self.topic]
        if changed:
            reason = f"measured anew: {changed}"
            self.decisions.record(self.topic, PLAIN, reason=reason, step=self._taken)
            self._forget()
        if self._routing.coded is not None and not changed and old.chosen in CANDIDATES:
            self._go_on(old)
        else:
            self._settle(owing)

    def _forget(self) -> None:
        """The next steps are measured as those of a new run."""
        self._due = self._step + WARM + MEASURED
        self._plain, self._errors = None, Errors() if self._routing.coded is not None else None
        self._times.clear()
        self._traffics.clear()
        self._failed.clear()

    def _go_on(self, old: Decision) -> None:
        """With the codec of an old decision, held to what was measured then."""
        figures = old.candidates[PLAIN]
        self._plain = Plain(*(_number(figures[key]) for key in ("s", _WAITED, _WIRE)))
        for name in CANDIDATES:
            owed = old.candidates.get(name, {}).get(_OWED)
            self._owed[name] = None if owed is None else _number(owed)
        self._errors = self._looks()
        if old.chosen != self.codec:
            self._use(old.chosen)


def way_of(found: Topology, topology: str, gather: Codec | None) -> Way:
    """How the bytes of a link travel over a probed network."""
    several = len(found.hosts.ranks) > 1
    level = found.level("network" if several else "loopback")
    assert level is not None
    size = sum(map(len, found.hosts.ranks))
    hosts = len(found.hosts.ranks)
    return Way(topology, size, hosts, level.latency_s, level.bytes_per_s, gather)


def codec_speeds(names: tuple[str, ...], device: torch.device) -> dict[str, Speed]:
    """Times each codec on this machine, with feedback; the slowest rank counts."""
    found = {name: codec_speed(name, device) for name in names}
    mine = {name: (one.encode_s, one.decode_s) for name, one in found.items()}
    every = groups.gather_objects(mine)
    return {name: Speed(*(max(one[name][i] for one in every) for i in (0, 1))) for name in names}


def _number(value: float | str | None) -> float:
    assert isinstance(value, float)
    return value


def _usual(traffics: Collection[Counter[Exchange]]) -> Traffic:
    """The median of the last steps: before one of them an evaluation may have gathered, too."""
    kinds = dict.fromkeys(kind for one in traffics for kind in one)  # in one order on every rank
    usual = {kind: median_low(one[kind] for one in traffics) for kind in kinds}
    return {kind: times for kind, times in usual.items() if times}
