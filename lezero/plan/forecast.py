"""Memory and time of a training step, before its model is allocated.

`forecast` runs two steps on fake tensors (`trace.py`), replays their allocations (`heap.py`) and
prices each distinct operation with its measured seconds (`measure.py`).

What the figures mean: memory is the peak of one rank above the libraries' own, with the host pool's
kept blocks where it is on; on an accelerator, of what torch allocates there. Time is one optimizer
step, all ranks of this machine computing at once.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lezero.core import device, facts, room
from lezero.core.errors import CapacityError, ConfigError
from lezero.memory import OVERHEAD, can_come_from_malloc
from lezero.ops.attention import available
from lezero.plan import communication, kinds
from lezero.plan.heap import resident_bytes
from lezero.plan.measure import OpTimes, as_in_a_step
from lezero.plan.scratch import kept_bytes
from lezero.plan.spec import Build, StepSpec, whole
from lezero.plan.trace import Trace, trace_step
from lezero.plan.work import attention_flops, flops
from lezero.profiler.ceilings import Ceilings
from lezero.profiler.hardware import Hardware

STATED_ERROR = {"memory": 0.10, "time": 0.25}
_FEW_BLOCKS = 0.20
"""Of memory at most, where blocks are a large part of it."""
_WITHOUT_COPIES = 0.25
"""Of memory, where the copies that convolutions make cannot be told: without them it is too low."""
_LEAST_ERROR_BYTES = 32 << 20
"""Libraries and a resumed checkpoint move a small run's peak by as much."""
_HEAP_STEPS = 5
_LIBRARY_BYTES = 14 << 20
"""What torch's CPU kernels keep besides tensors (code made at run time, scratch, threads): 9 to 17
MiB in six runs on torch 2.13, in fp32 and in bf16."""
_DISPATCH_S = 12e-6
"""What autograd, autocast and the modules add to an operation, as measured on a small model."""
_WORTH_A_TRIAL = 200
"""Micro-batches from which on the engine tries another attention kernel."""


@dataclass(frozen=True)
class Forecast:
    """What a step will take.

    memory_bytes: peak of one rank above imports, in all; memory_parts: the same by what it is for,
    at the moment of the peak. state_bytes: whole size of parameters, gradients, optimizer state and
    buffers, whether or not all of it is there at the peak. step_seconds and time_parts: one
    optimizer step. flops: of matrix products and attention, one step of all ranks here; ceiling:
    the machine's measured rate for them in FLOP/s, where known. stage: of ZeRO, None where the
    model is not sharded (pages that ranks share count once over their sharers). attention: whose
    kernel computes it. limit_bytes: what one rank may use. stated_error: of memory and time, as
    fractions of the forecast; memory's is never less than 32 MiB, on the CPU the largest block of a
    step (at most 0.2), and 0.25 where copies that convolutions make are not known
    (`lezero.memory.recorded`).
    """

    memory_bytes: int
    memory_parts: dict[str, int]
    state_bytes: dict[str, int]
    step_seconds: float
    time_parts: dict[str, float]
    flops: float
    ceiling: float | None
    limit_bytes: int
    parameters: int
    tokens_per_step: int
    ranks: int
    precision: str
    form: str
    stage: int | None = None
    attention: str = "torch"
    steps: int | None = None
    suggestions: tuple[str, ...] = ()
    made_in_seconds: float = 0.0
    stated_error: dict[str, float] = field(default_factory=lambda: dict(STATED_ERROR))

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.limit_bytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second over all ranks."""
        return self.tokens_per_step / self.step_seconds if self.step_seconds else 0.0

    @property
    def run_seconds(self) -> float | None:
        """Time of the whole run's steps, where their number is known."""
        return None if self.steps is None else self.steps * self.step_seconds

    def require_fit(self) -> None:
        """Raises `CapacityError` with what would fit when the step does not."""
        if self.fits:
            return
        text = (
            f"this run does not fit: it needs {size(self.memory_bytes)} a rank and "
            f"{size(self.limit_bytes)} is free for one. "
        )
        if self.suggestions:
            text += "What would fit: " + "; ".join(self.suggestions) + "."
        else:
            text += "No batch, sequence or precision of this model fits: take a smaller model."
        raise CapacityError(text)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "memory_bytes": self.memory_bytes,
            "memory_parts": self.memory_parts,
            "state_bytes": self.state_bytes,
            "limit_bytes": self.limit_bytes,
            "fits": self.fits,
            "suggestions": list(self.suggestions),
            "step_seconds": self.step_seconds,
            "time_parts": self.time_parts,
            "tokens_per_s": self.tokens_per_s,
            "run_seconds": self.run_seconds,
            "flops": self.flops,
            "ceiling": self.ceiling,
            "parameters": self.parameters,
            "tokens_per_step": self.tokens_per_step,
            "ranks": self.ranks,
            "precision": self.precision,
            "form": self.form,
            "stage": self.stage,
            "attention": self.attention,
            "steps": self.steps,
            "stated_error": self.stated_error,
            "made_in_seconds": self.made_in_seconds,
        }


def forecast(
    build: Build,
    spec: StepSpec,
    hardware: Any = None,
    *,
    limit_bytes: int | None = None,
    budget_s: float = 8.0,
) -> Forecast:
    """Forecasts one rank's training step of the model that `build()` returns.

    hardware: `lezero.profiler.hardware()`, for the machine's ceilings. limit_bytes: memory that a
    rank may use (default: what is free now, shared by the ranks here). budget_s: most seconds spent
    on measuring operations. Nothing of the model is allocated.

    Raises `ConfigError` for arguments of another kind, and when a step cannot be run on fake
    tensors.
    """
    started = time.perf_counter()
    _check(spec, hardware, budget_s)
    limit = free_bytes(spec) if limit_bytes is None else whole("limit_bytes", limit_bytes)
    times = OpTimes.of_this_machine(spec)
    trace, attention, (seconds, time_parts) = _fastest(build, spec, times, budget_s)
    calls = trace.calls.values()
    scratch = times.scratch(calls, spec.neighbours)
    with as_in_a_step(spec):
        trace = trace.with_copies(times.courses(call for _, _, call in trace.holders))
    memory, parts = memory_of(trace, spec, scratch)
    suggestions: tuple[str, ...] = ()
    if memory > limit:
        from lezero.plan.capacity import can_shard_more, suggest

        if can_shard_more(spec) or sum(trace.state_bytes.values()) < limit:
            kept = kept_bytes(scratch, trace.first)
            suggestions = suggest(build, spec, limit, kept, times.courses)
    return Forecast(
        memory_bytes=memory,
        memory_parts=parts,
        state_bytes=dict(trace.state_bytes),
        step_seconds=seconds,
        time_parts=time_parts,
        flops=_flops_of(trace, spec) * spec.neighbours,
        ceiling=_ceiling(hardware, spec),
        limit_bytes=limit,
        parameters=trace.parameters,
        tokens_per_step=spec.tokens_per_step,
        ranks=spec.ranks,
        precision=spec.precision,
        form=spec.form,
        stage=spec.zero.stage if spec.zero is not None else None,
        attention=attention,
        steps=spec.steps,
        suggestions=suggestions,
        stated_error={
            "memory": _error_of_memory(trace, spec, memory),
            "time": STATED_ERROR["time"],
        },
        made_in_seconds=time.perf_counter() - started,
    )


def _error_of_memory(trace: Trace, spec: StepSpec, memory: int) -> float:
    """One small object in the hole of the largest block, and the heap grows by another of it, or
    none and it does not. In whole percent, as people are told, since the rest moves a little."""
    least = max(STATED_ERROR["memory"], _LEAST_ERROR_BYTES / memory)
    if spec.device != "cpu":
        return least
    least = max(least, min(_FEW_BLOCKS, math.ceil(100 * trace.largest / memory) / 100))
    return max(least, _WITHOUT_COPIES) if trace.holders else least


def _check(spec: Any, hardware: Any, budget_s: Any) -> None:
    if not isinstance(spec, StepSpec):
        raise ConfigError(
            f"spec: got {spec!r}, allowed is a StepSpec, as StepSpec(batch=8, tokens=256)"
        )
    if not isinstance(hardware, Hardware | Ceilings | None):
        raise ConfigError(
            f"hardware: got {hardware!r}, allowed is what lezero.profiler.hardware() returns: "
            "times are measured on this machine, so leave it out, or run the forecast on the other"
        )
    if isinstance(budget_s, bool) or not isinstance(budget_s, int | float) or not budget_s >= 0:
        raise ConfigError(f"budget_s: got {budget_s!r}, allowed are seconds from 0 on")


def _fastest(
    build: Build, spec: StepSpec, times: OpTimes, budget_s: float
) -> tuple[Trace, str, tuple[float, dict[str, float]]]:
    """The step with the attention kernel that it will use, and its time."""
    tried = spec.attention != "torch" and may_use_ours(spec)
    if tried and spec.attention == "lezero":
        ours = trace_step(build, spec, fast_attention=True)
        return ours, "lezero", _time_of(ours, spec, times, budget_s)
    plain = trace_step(build, spec)
    time_of_plain = _time_of(plain, spec, times, budget_s)
    if not tried:
        return plain, "torch", time_of_plain
    ours = trace_step(build, spec, fast_attention=True)
    if ours.calls.keys() == plain.calls.keys():
        return plain, "torch", time_of_plain
    time_of_ours = _time_of(ours, spec, times, budget_s)
    if time_of_ours[0] < 0.99 * time_of_plain[0]:
        return ours, "lezero", time_of_ours
    return plain, "torch", time_of_plain


def may_use_ours(spec: StepSpec) -> bool:
    """Whether the engine would try LeZero's attention kernel for this step."""
    if spec.precision != "bf16" or spec.device != "cpu":
        return False
    long_enough = spec.steps is None or spec.steps * spec.accumulate >= _WORTH_A_TRIAL
    return (long_enough or spec.attention == "lezero") and available()


def free_bytes(spec: StepSpec) -> int:
    """Memory that one rank may use: what is free on this machine now, shared by its ranks."""
    if spec.device != "cpu":
        return device.memory_free()
    return room.free_memory(spec.neighbours)


def memory_of(
    trace: Trace, spec: StepSpec, scratch: Mapping[str, int]
) -> tuple[int, dict[str, int]]:
    """Peak resident bytes of one rank and their parts. scratch: bytes that the library of matrix
    products needs for calls, by their key."""
    live, found = trace.peak()
    names = [kinds.PARAMETER, kinds.GRADIENT, kinds.OPTIMIZER, kinds.ACTIVATION]
    names += [name for name in (kinds.WHOLE, kinds.WIRE, kinds.FEEDBACK) if name in found]
    parts = {name: found.get(name, 0) for name in names}
    parts[kinds.BUFFER] = live - sum(parts.values())
    if spec.device != "cpu":
        parts["allocator"] = live // 50
        parts["libraries"] = device.workspace_bytes()
    else:
        heap = live - trace.mapped_bytes
        kept = kept_bytes(scratch, trace.first)
        resident = _resident(trace, spec, scratch, heap + kept)
        parts["pool" if spec.pool else "allocator"] = resident - heap - kept
        parts["libraries"] = _LIBRARY_BYTES + kept
    if spec.saves and spec.device == "cpu":  # elsewhere its copy is not in the memory counted here
        state = trace.state_bytes
        copied = (kinds.PARAMETER, kinds.OPTIMIZER, kinds.FEEDBACK)
        parts["checkpoint"] = sum(state.get(kind, 0) for kind in copied)
    return sum(parts.values()), parts


def _resident(trace: Trace, spec: StepSpec, scratch: Mapping[str, int], live: int) -> int:
    """Bytes of the heap at the peak."""
    return resident_bytes(
        trace.heap_steps(_HEAP_STEPS, scratch),
        live,
        keep=spec.pool,
        overhead=OVERHEAD if spec.pool and can_come_from_malloc() else None,
        most=facts.memory().total,
    )


def _time_of(
    trace: Trace, spec: StepSpec, times: OpTimes, budget_s: float
) -> tuple[float, dict[str, float]]:
    with as_in_a_step(spec):
        each = times.measure(trace.calls.values(), neighbours=spec.neighbours, budget_s=budget_s)
        exchanges = communication.seconds(trace, spec)
    repeats = {"again": spec.accumulate - 1}
    parts: defaultdict[str, float] = defaultdict(float)
    operations = 0
    for phase, counts in trace.counts.items():
        which, _, name = phase.rpartition(" ")
        repeat = repeats.get(which, 1)
        parts[name] += repeat * sum(each[key] * count for key, count in counts.items())
        operations += repeat * (sum(counts.values()) + trace.views[phase])
    host = operations * _DISPATCH_S
    # An accelerator computes while the host prepares what comes next.
    parts["dispatch"] = host if spec.device == "cpu" else max(0.0, host - sum(parts.values()))
    parts |= exchanges
    return sum(parts.values()), dict(parts)


def _flops_of(trace: Trace, spec: StepSpec) -> float:
    """Floating-point operations of one rank's step."""
    total = 0.0
    for phase, counts in trace.counts.items():
        repeat = spec.accumulate - 1 if phase.startswith("again") else 1
        for key, count in counts.items():
            call = trace.calls[key]
            total += repeat * count * (flops(call) + attention_flops(call))
    return total


def _ceiling(hardware: Any, spec: StepSpec) -> float | None:
    """The measured GEMM rate of all ranks here: ceilings are measured with one rank's threads."""
    ceilings = getattr(hardware, "ceilings", hardware)
    found = getattr(ceilings, f"gemm_{spec.precision}", None)
    if not found:
        return None
    threads = getattr(ceilings, "threads", None) or facts.usable_cores()
    at_once = max(1, min(spec.neighbours, facts.usable_cores() // threads))
    return float(found) * (at_once if spec.device == "cpu" else spec.neighbours)


def size(count: float) -> str:
    """Bytes for people: 1.23 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB" if count < 1024 else f"{count / 1024:.2f} TiB"
