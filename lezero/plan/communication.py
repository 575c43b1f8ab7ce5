"""Seconds that a step's exchanges take: formulas of bytes, and measured latency and bandwidth.

With P partners and n bytes to each, an exchange takes α + P · n / β (`comm/probe.py` measures α and
β, `comm/account.py` counts the bytes). In shared memory nothing is sent: a gather copies what the
others hold, a sum reads every rank's part once and writes one (`comm/choice.py`, `Memory`). Nothing
is hidden behind computation, which is the truth where ranks share a machine's cores, and too much
where each machine has cores to spare.
"""

from __future__ import annotations

import functools

import torch

from lezero.comm.choice import Memory, Speed, Way
from lezero.comm.codec import codec
from lezero.comm.codec_speed import codec_speed
from lezero.comm.probe import Level
from lezero.plan import sharded
from lezero.plan.kinds import GRADIENT
from lezero.plan.spec import StepSpec
from lezero.plan.trace import Trace

ASSUMED = {
    "memory": Level("memory", 1.5e-4, 8e9),
    "loopback": Level("loopback", 2e-4, 1.2e9),
    "network": Level("network", 2e-4, 1.2e9),
}
"""Where nothing was measured: shared memory and Gloo between two ranks of a small machine."""


def seconds(trace: Trace, spec: StepSpec) -> dict[str, float]:
    """Parts of a step's time: "communication", and "codec" where gradients are encoded."""
    if spec.ranks == 1:
        return {}
    if spec.zero is None:
        moved = 2 * (spec.ranks - 1) / spec.ranks * trace.state_bytes[GRADIENT]
        return {"communication": moved / level(spec, "flat").bytes_per_s}
    way = sharded.topology(spec)
    used = level(spec, way)
    small = _small(spec)
    near = level(spec, "shared")
    memory = Memory(near.latency_s, near.bytes_per_s)
    if way == "shared":
        return {"communication": memory.seconds(trace.traffic, spec.ranks) + small}
    encoder = sharded.encoder(spec)
    gather = None if spec.wire.gather == "none" else codec(spec.wire.gather)
    count = sharded.hosts(spec)
    route = Way(way, spec.ranks, count, used.latency_s, used.bytes_per_s, gather)
    found = {"communication": route.seconds(trace.traffic, encoder) + small}
    found["communication"] += memory.beside(route, trace.traffic, encoded=encoder is not None)
    coding = 0.0
    if encoder is not None:
        coding += _speed(encoder.name, spec.device).seconds(
            trace.traffic, spec.ranks, route.partners
        )
    if gather is not None:
        coding += _speed(gather.name, spec.device).gathering(
            trace.traffic, spec.ranks, route.partners
        )
    return found | ({"codec": coding} if coding else {})


def _small(spec: StepSpec) -> float:
    """Exchanges of a few numbers, which go through sockets whatever the wire: which parameters each
    backward used, and the norm."""
    assert spec.zero is not None
    backwards = spec.accumulate if spec.zero.stage >= 2 else 1
    return (backwards + spec.clip) * level(spec, "flat").latency_s


def level(spec: StepSpec, way: str) -> Level:
    """The slowest level that the exchanges pass, measured where it was, else assumed."""
    name = "memory" if way == "shared" else "network" if sharded.hosts(spec) > 1 else "loopback"
    return next((one for one in spec.levels if one.name == name), ASSUMED[name])


@functools.cache
def _speed(name: str, kind: str) -> Speed:
    """Of a codec, as this rank alone finds it where the run computes: a forecast is made by one."""
    return codec_speed(name, torch.device(kind))
