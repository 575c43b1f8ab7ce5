"""Seconds that a step's exchanges take: formulas of bytes, and measured latency and bandwidth.

With P partners and n bytes to each, an exchange takes α + P · n / β (`comm/probe.py` measures α and
β, `comm/account.py` counts the bytes). In shared memory nothing is sent: a gather copies what the
others hold, a sum reads every rank's part once and writes one. Nothing is hidden behind
computation, which is the truth where ranks share a machine's cores.
"""

from __future__ import annotations

import functools
import time
from collections import Counter

import torch

from lezero.comm.choice import Exchange, Speed, Way
from lezero.comm.codec import codec
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

_TIMED = 1 << 20  # elements


def seconds(trace: Trace, spec: StepSpec) -> dict[str, float]:
    """Parts of a step's time: "communication", and "codec" where gradients are encoded."""
    if spec.ranks == 1:
        return {}
    if spec.zero is None:
        moved = 2 * (spec.ranks - 1) / spec.ranks * trace.state_bytes[GRADIENT]
        return {"communication": moved / level(spec, "flat").bytes_per_s}
    way = sharded.topology(spec)
    used = level(spec, way)
    if way == "shared":
        return {"communication": _in_memory(trace.traffic, spec.ranks, used)}
    encoder = sharded.encoder(spec)
    gather = None if spec.wire.gather == "none" else codec(spec.wire.gather)
    count = sharded.hosts(spec)
    route = Way(way, spec.ranks, count, used.latency_s, used.bytes_per_s, gather)
    found = {"communication": route.seconds(trace.traffic, encoder)}
    if encoder is not None:
        found["codec"] = _speed(encoder.name).seconds(trace.traffic, spec.ranks)
    return found


def level(spec: StepSpec, way: str) -> Level:
    """The slowest level that the exchanges pass, measured where it was, else assumed."""
    name = "memory" if way == "shared" else "network" if sharded.hosts(spec) > 1 else "loopback"
    return next((one for one in spec.levels if one.name == name), ASSUMED[name])


def _in_memory(traffic: Counter[Exchange], ranks: int, used: Level) -> float:
    """β is of a copy, which moves two bytes of memory for one; a sum moves `ranks` + 1."""
    total = 0.0
    for (operation, numel, itemsize), times in traffic.items():
        chunk = numel // ranks * itemsize
        moved = 0.0 if operation == "reduce_scatter" else (ranks - 1.0) * chunk
        if operation != "all_gather":
            moved += chunk * (ranks + 1) / 2
        messages = 2 if operation == "all_reduce" else 1
        total += times * (messages * used.latency_s + moved / used.bytes_per_s)
    return total


@functools.cache
def _speed(name: str) -> Speed:
    """Times a codec, as this rank alone: a forecast is made by one."""
    one, values = codec(name), torch.randn(_TIMED)
    error, out = torch.zeros_like(values), torch.zeros_like(values)
    payload = torch.empty(one.bytes(_TIMED), dtype=torch.uint8)
    turns = []
    for _ in range(3):
        began = time.perf_counter()
        one.encode(values, payload, error)
        middle = time.perf_counter()
        one.decode(payload, out, add=True)
        turns.append((middle - began, time.perf_counter() - middle))
    return Speed(*(min(turn[side] for turn in turns) / _TIMED for side in (0, 1)))
