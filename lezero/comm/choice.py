"""Which codec pays: the policy of `Wire(codec="auto")`, in plain Python.

A step of `plain.step_s` seconds without a codec stood still for the wire part of that time; the
rest of the wire's time was hidden behind computation. A codec shortens the wire's time and costs
time of its own. What it would make of the step:

    step − stood still + what can still not be hidden + encoding and decoding

The smallest wins if its error is within the budget and it saves more than `MARGIN` of the step.
Otherwise the answer is "none".

[Note: error budget]
The error of a codec is what it still owes, ‖e‖ / ‖g‖: the kept error (feedback) after encoding the
run's own first gradients, over the gradient. 0.1 means that a tenth of a gradient's length is
always on its way. docs/wires.md tells what loss it cost. The default admits int8 and int4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lezero.comm.account import sent_bytes
from lezero.comm.codec import Codec

PLAIN = "none"
MARGIN = 0.03
"""A codec must shorten the step by more than this fraction."""


class Exchange(NamedTuple):
    """A kind of collective: `numel` elements of the whole tensor, `itemsize` bytes each."""

    operation: str
    numel: int
    itemsize: int


Traffic = Mapping[Exchange, int]
"""How often each exchange happens in one step."""


@dataclass(frozen=True)
class Way:
    """How a link's bytes travel: α–β of the slowest level on the way, and who takes part."""

    topology: str
    size: int
    hosts: int
    latency_s: float
    bytes_per_s: float
    gather: Codec | None = None

    @property
    def partners(self) -> int:
        """Ranks among whom sockets are used, this one included."""
        return self.hosts if self.topology == "hierarchical" else self.size

    def seconds(self, traffic: Traffic, codec: Codec | None) -> float:
        """The wire's time in one step."""
        total = 0.0
        for exchange, times in traffic.items():
            total += times * self._messages(exchange) * self.latency_s
        return total + self.bytes(traffic, codec) / self.bytes_per_s

    def bytes(self, traffic: Traffic, codec: Codec | None) -> int:
        """Bytes that a rank sends in one step; those of a host's ranks leave by one cable."""
        sent = sum(
            times
            * sent_bytes(
                exchange.operation,
                exchange.numel,
                exchange.itemsize,
                topology=self.topology,
                size=self.size,
                hosts=self.hosts,
                codec=codec,
                gather=self.gather,
            )
            for exchange, times in traffic.items()
        )
        return sent * (self.size // self.hosts if self.hosts > 1 else 1)

    @staticmethod
    def _messages(exchange: Exchange) -> int:
        return 2 if exchange.operation == "all_reduce" else 1


@dataclass(frozen=True)
class Speed:
    """Seconds that a codec takes for one element on this machine."""

    encode_s: float
    decode_s: float

    def seconds(self, traffic: Traffic, size: int, partners: int) -> float:
        """Encoding and decoding of one step's gradients on one rank of `size`."""
        total = 0.0
        for (operation, numel, _), times in traffic.items():
            chunk = numel // size
            if operation != "all_gather":
                total += times * chunk * (partners - 1) * (self.encode_s + self.decode_s)
            if operation == "all_reduce":
                total += times * chunk * (self.encode_s + partners * self.decode_s)
        return total

    def gathering(self, traffic: Traffic, size: int, partners: int) -> float:
        """The same of its parameters."""
        total = 0.0
        for (operation, numel, _), times in traffic.items():
            if operation == "all_gather":
                total += times * (numel // size) * (self.encode_s + partners * self.decode_s)
        return total


@dataclass(frozen=True)
class Memory:
    """The memory of a host as the probe finds it: β is of a copy, which reads a byte for each that
    it writes. A sum of n parts reads n bytes for one written, so it takes (n + 1) / 2 copies."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, traffic: Traffic, ranks: int) -> float:
        """Exchanges with the shared topology; shards lie in their place."""
        total = 0.0
        for (operation, numel, itemsize), times in traffic.items():
            chunk = numel // ranks * itemsize
            moved = 0.0 if operation == "reduce_scatter" else (ranks - 1.0) * chunk
            if operation != "all_gather":
                moved += chunk * (ranks + 1) / 2
            messages = 2 if operation == "all_reduce" else 1
            total += times * (messages * self.latency_s + moved / self.bytes_per_s)
        return total

    def beside(self, way: Way, traffic: Traffic, *, encoded: bool) -> float:
        """What exchanges over sockets take in memory besides: their sums (with a codec they are a
        part of decoding), and what hierarchical ones move inside a host."""
        local = way.size // way.partners
        total = 0.0
        for (operation, numel, itemsize), times in traffic.items():
            chunk = numel // way.size * itemsize
            if operation != "all_gather" and not encoded:
                total += times * chunk * (way.partners + 1) / 2 / self.bytes_per_s
            if local > 1:
                inside = {Exchange(operation, numel, itemsize): times}
                total += self.seconds(inside, local)
        return total


@dataclass(frozen=True)
class Plain:
    """Steps as they were without a codec: seconds of one, and those that stood still for the wire.

    `wire_s`: the wire's own time, hidden or not.
    """

    step_s: float
    waited_s: float
    wire_s: float

    @property
    def exposed_s(self) -> float:
        """What of the wire's time the step stood still for; other waits are for slow ranks."""
        return min(self.waited_s, self.wire_s)

    def moved(self, wire_s: float) -> Plain:
        """The same steps on a wire that now takes `wire_s`, with as much of it hidden."""
        exposed = max(0.0, wire_s - (self.wire_s - self.exposed_s))
        return Plain(self.step_s - self.exposed_s + exposed, exposed, wire_s)


@dataclass(frozen=True)
class Candidate:
    """A codec with its time on the wire, its own time, and its error (None: not measured; it is
    refused then)."""

    codec: str
    wire_s: float
    codec_s: float
    error: float | None


@dataclass(frozen=True)
class Choice:
    """`seconds`: predicted step of each candidate and of the plain wire. `gain`: the fraction of
    the step that the chosen one saves. `refused`: who was out of the budget, and why."""

    codec: str
    reason: str
    seconds: Mapping[str, float]
    gain: float
    refused: Mapping[str, str]

    def figures(self) -> dict[str, dict[str, float | str | None]]:
        """For the record of the decision."""
        found: dict[str, dict[str, float | str | None]] = {}
        for name, seconds in self.seconds.items():
            found[name] = {"s": seconds}
            if name in self.refused:
                found[name]["note"] = self.refused[name]
        return found


def predict(plain: Plain, candidate: Candidate) -> float:
    """Seconds of a step with `candidate`."""
    return plain.moved(candidate.wire_s).step_s + candidate.codec_s


def choose(
    plain: Plain, candidates: Sequence[Candidate], budget: float, margin: float = MARGIN
) -> Choice:
    """The codec that makes the step shortest within the budget, or "none"."""
    seconds, refused = {PLAIN: plain.step_s}, {}
    for one in candidates:
        seconds[one.codec] = predict(plain, one)
        if one.error is None:
            refused[one.codec] = "error not measured: all gradients were zero or not finite"
        elif not one.error <= budget:  # NaN is refused too
            refused[one.codec] = f"error {one.error:.2g}, budget {budget:g}"
    allowed = {name: value for name, value in seconds.items() if name not in refused}
    best = min(allowed, key=lambda name: allowed[name])
    gain = 1 - seconds[best] / plain.step_s if plain.step_s > 0 else 0.0
    if best != PLAIN and gain > margin:
        reason = f"saves {gain:.0%} of a step by prediction, within the error budget"
        return Choice(best, reason, seconds, gain, refused)
    share = plain.exposed_s / plain.step_s if plain.step_s > 0 else 0.0
    reason = f"no codec saves {margin:.0%} of a step; {share:.0%} of it stood still for the wire"
    return Choice(PLAIN, reason, seconds, 0.0, refused)
