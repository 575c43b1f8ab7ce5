"""Tests the wires between ranks: right or wrong, how fast against prediction, what auto would do.

Started alone it launches the ranks; inside a launch each rank runs `measure`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from lezero.comm import Link, Mesh, Pending, Wire
from lezero.comm.choice import Candidate, Exchange, Memory, Plain, Way, choose
from lezero.comm.chooser import codec_speeds, way_of
from lezero.comm.codec import codec
from lezero.comm.owed import CANDIDATES, Errors
from lezero.comm.probe import Topology, probe
from lezero.core import groups
from lezero.core.errors import ConfigError
from lezero.elastic import LaunchConfig, launch
from lezero.jobs.wire_checks import Check, check, wires
from lezero.models.presets import PRESETS, preset

FORMAT = 1
_SIZES = (1 << 16, 1 << 20, 1 << 24)  # bytes of the whole tensor, fp32
_LONGEST_S = 1.0
_AXIS = "ranks"


@dataclass
class Timed:
    """One collective on one size. `predicted_s`: by latency and bandwidth alone."""

    topology: str
    level: str
    operation: str
    nbytes: int
    seconds: float
    predicted_s: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the whole tensor a second."""
        return self.nbytes / self.seconds


@dataclass
class Answer:
    """What codec auto would say for a model if nothing of the wire were hidden by computation."""

    parameters: int
    chosen: str
    reason: str
    candidates: dict[str, dict[str, float | str | None]]


@dataclass
class Report:
    """All findings, the same on every rank."""

    ranks: int
    topology: Topology
    checks: list[Check] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)
    answer: Answer | None = None

    @property
    def right(self) -> bool:
        return not any(one.wrong for one in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "right": self.right,
            "ranks": self.ranks,
            "hosts": [list(host) for host in self.topology.hosts.ranks],
            "levels": [asdict(level) for level in self.topology.levels],
            "checks": [asdict(one) for one in self.checks],
            "timed": [asdict(one) for one in self.timed],
            "auto": asdict(self.answer) if self.answer is not None else None,
        }


def dist_test(
    ranks: int, model: str, *, as_json: bool = False, port: int = 0, oversubscribe: bool = False
) -> int:
    """Tests `ranks` ranks of this machine, or those of the launch that this process is part of.

    Prints a report (rank 0) and returns 0, or 1 when a collective gave a wrong result. Raises
    `ConfigError` for a model that is neither a preset nor a number, `CapacityError` for more ranks
    than cores, `DistributedError` for a port in use or a missing network interface.
    """
    parameters = count_parameters(model) if model else 0
    if ranks > 1 and not groups.launched():
        groups.need_interface()  # told once, not by every rank
        config = LaunchConfig(
            ranks=ranks, port=port, max_restarts=0, quiet=as_json, oversubscribe=oversubscribe
        )
        words = ["-m", "lezero", "dist-test", "--np", str(ranks), "--model", model]
        return launch(config, [*words, *(["--json"] if as_json else [])])
    groups.join(timeout_s=120, backend="gloo")  # tensors of the host, whatever else is here
    try:
        report = measure(parameters)
    finally:
        groups.leave()
    if groups.is_main():
        from lezero.jobs.dist_test_view import text

        print(json.dumps(report.to_json()) if as_json else text(report), flush=True)
    return int(not report.right)


def count_parameters(model: str) -> int:
    """Of a preset's name, or a number such as "350000000", "350m", "1.3b"."""
    if model in PRESETS:
        from lezero.models import Transformer

        with torch.device("meta"):
            return sum(p.numel() for p in Transformer(preset(model)).parameters())
    scales = {"k": 1e3, "m": 1e6, "b": 1e9}
    digits = model[:-1] if model[-1:].lower() in scales else model
    try:
        found = int(float(digits) * scales.get(model[-1:].lower(), 1))
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise ConfigError(
            f"--model: got '{model}', allowed is a preset ({', '.join(PRESETS)}) or a number of "
            "parameters such as 350m or 1.3b"
        )
    return found


def measure(parameters: int) -> Report:
    """On every rank of a group that was joined."""
    world = groups.world_size()
    kind = "cpu"
    with Mesh({_AXIS: world}, kind) as mesh:
        found = probe(mesh, _AXIS)
        report = Report(world, found)
        if world == 1:
            return report
        topologies = ["flat"]
        if found.hosts.single and found.level("memory") is not None:
            topologies.append("shared")
        if found.hosts.regular:
            topologies.append("hierarchical")
        for name, wire in wires(tuple(topologies)):
            report.checks.append(check(mesh, _AXIS, name, wire))
        for topology in topologies:
            report.timed += _timed(mesh, found, topology)
        if parameters:
            report.answer = _answer(mesh, found, parameters)
    return report


def _timed(mesh: Mesh, found: Topology, topology: str) -> list[Timed]:
    rows = []
    with Link(Wire.parse({"topology": topology}), mesh, _AXIS) as link:
        for nbytes in _SIZES:
            numel = nbytes // 4 // link.size * link.size
            whole = link.buffer(numel, torch.float32)
            part = whole.view(link.size, -1)[link.rank]
            calls: dict[str, Callable[[], Pending]] = {
                "reduce_scatter": partial(link.reduce_scatter, whole, part, key="time"),
                "all_gather": partial(link.all_gather, part, whole, key="time"),
                "all_reduce": partial(link.all_reduce, whole, key="time"),
            }
            for operation, call in calls.items():
                level, predicted = _predicted(found, topology, operation, numel)
                if predicted > _LONGEST_S:
                    continue
                call().wait()
                turns = []
                for _ in range(3):
                    groups.barrier()
                    began = time.perf_counter()
                    call().wait()
                    turns.append(max(groups.gather_objects(time.perf_counter() - began)))
                rows.append(Timed(topology, level, operation, numel * 4, median(turns), predicted))
    return rows


def _predicted(found: Topology, topology: str, operation: str, numel: int) -> tuple[str, float]:
    """The level that the bytes travel on, and the seconds that it should take."""
    size, hosts = sum(map(len, found.hosts.ranks)), len(found.hosts.ranks)
    traffic = {Exchange(operation, numel, 4): 1}
    near = found.level("memory")
    memory = Memory(near.latency_s, near.bytes_per_s) if near is not None else None
    if topology == "shared":
        assert memory is not None
        return "memory", memory.seconds(traffic, size)
    outer = found.level("network" if hosts > 1 else "loopback")
    assert outer is not None
    way = Way(topology, size, hosts, outer.latency_s, outer.bytes_per_s)
    seconds = way.seconds(traffic, None)
    if memory is not None:
        seconds += memory.beside(way, traffic, encoded=False)
    return outer.name, seconds


def _answer(mesh: Mesh, found: Topology, parameters: int) -> Answer:
    """For gradients of `parameters` elements in fp32, all-reduced once a step."""
    wire = Wire(codec="auto")
    with Link(wire, mesh, _AXIS) as link:
        if link.topology == "shared":
            reason = "the ranks share one host's memory: no byte travels, so no codec can pay"
            return Answer(parameters, "none", reason, {})
        way = way_of(found, link.topology, None)
    speeds = codec_speeds(CANDIDATES, torch.device("cpu"))
    errors, generator = Errors(), torch.Generator().manual_seed(0)
    for _ in range(3):
        errors.note("x", torch.randn(1 << 16, generator=generator))
    owed = {name: (one / total) ** 0.5 for name, (one, total) in errors.found().items()}
    traffic = {Exchange("all_reduce", -(-parameters // way.size) * way.size, 4): 1}
    wire_s = way.seconds(traffic, None)
    candidates = [
        Candidate(
            name,
            way.seconds(traffic, codec(name)),
            speeds[name].seconds(traffic, way.size, way.partners),
            owed[name],
        )
        for name in CANDIDATES
    ]
    made = choose(Plain(wire_s, wire_s, wire_s), candidates, wire.budget)
    return Answer(parameters, made.codec, made.reason, made.figures())
