"""Forecast against measured at every stage of ZeRO: peak memory and time of a step.

Part of `zero.py`, also by itself: `python benchmarks/_zero_forecast.py [--quick]`. Two ranks of one
thread train the model of `zero.py` at a stage; memory is sampled in steps of its own after the
timed ones, as each process's pages and its part of those that the ranks share. Then rank 0
forecasts the same step, with the latency and bandwidth that the ranks have probed. The peak of the
rank that has more counts, and the median step.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from _table import arguments, columns, emit, finish, nothing_measured, side
from _turns import compare_in_turns, turns
from torch.nn import functional as F
from zero import GPT, LENGTH, STAGES, VOCAB, adamw, resident, zero

SIZES = {"quick": ((4, 256),), "full": ((8, 512), (16, 1024))}
TURNS, STEPS, WARM, SAMPLED = 2, 4, 2, 3


class Peak:
    """Samples `resident()` in a thread."""

    def __init__(self) -> None:
        self.highest, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            self.highest = max(self.highest, resident())
            self._over.wait(0.01)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def turns_of_all() -> Iterator[None]:
    """The turns that rank 0 is given, on every rank."""
    from lezero.core import groups

    given = turns() if groups.is_main() else iter(())
    while groups.broadcast_object(next(given, "over") is None):
        yield


def measured(stage: int, layers: int, width: int) -> dict[str, float]:
    """Trains on this rank."""
    base = resident()
    torch.manual_seed(0)
    model, optimizer = zero(stage)(GPT(layers, width))

    def step() -> float:
        tokens = torch.randint(0, VOCAB, (1, LENGTH + 1))
        dist.barrier()
        began = time.perf_counter()
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    for _ in range(WARM):
        step()
    seconds = [step() for _ in turns_of_all() for _ in range(STEPS)]
    with Peak() as peak:
        for _ in range(SAMPLED):
            step()
    return {"memory": float(peak.highest - base), "seconds": statistics.median(seconds)}


def foreseen(stage: int, layers: int, width: int) -> dict[str, float]:
    """What rank 0 forecasts; the probe is of both ranks."""
    from lezero.comm import Mesh
    from lezero.comm.probe import probe
    from lezero.core import groups
    from lezero.parallel.zero import Zero
    from lezero.plan import StepSpec, forecast

    levels = probe(Mesh({"shard": groups.world_size()}), "shard").levels
    spec = StepSpec(
        batch=1, tokens=LENGTH, ranks=groups.world_size(), pool=False, clip=False, levels=levels,
        zero=Zero(stage=stage, compute="bf16"), optimizer=adamw, loss=loss_of,
        inputs=lambda batch, tokens: torch.zeros(batch, tokens + 1, dtype=torch.int64),
    )  # fmt: skip
    every = []
    for _ in turns_of_all():
        if groups.is_main():
            with nothing_measured():
                every.append(forecast(lambda: GPT(layers, width), spec, limit_bytes=1 << 50))
    if not every:
        return {}
    return {
        "memory": float(every[0].memory_bytes),
        "seconds": statistics.median(made.step_seconds for made in every),
    }


def rank(kind: str, stage: int, layers: int, width: int) -> dict[str, float]:
    """One rank's figures of one side."""
    import importlib

    import lezero.optim  # noqa: F401  (imports are not what is measured)
    from lezero.core import groups

    torch.set_num_threads(1)
    groups.join(backend="gloo")
    importlib.import_module("torch._dynamo")
    try:
        found = (measured if kind == "measured" else foreseen)(stage, layers, width)
        if kind == "measured":
            every = groups.gather_objects(found)
            return {key: max(one[key] for one in every) for key in found}
        told: dict[str, float] = groups.broadcast_object(found)
        return told
    finally:
        groups.leave()


def errors(quick: bool, rounds: int) -> tuple[str, dict[str, float]]:
    """A table, and {"memory_forecast_error_max", "time_forecast_error_max"} as fractions."""
    rows = [["model, stage", "memory", "forecast", "error", "step", "forecast", "error"]]
    worst = {"memory": 0.0, "seconds": 0.0}
    for layers, width in SIZES["quick" if quick else "full"]:
        for name in STAGES[-1:] if quick else STAGES:
            extra = ("--shape", f"{layers}x{width}", "--stage", name[-1])
            sides = [side(__file__, kind, *extra) for kind in ("measured", "forecast")]
            result = compare_in_turns(sides, rounds=rounds, steps=TURNS)
            if result.failed:
                raise SystemExit(f"{name}: {result.failed}")
            row = [f"{layers}x{width}, {name[-1]}"]
            for key, unit, text in (("memory", 2**20, "MiB"), ("seconds", 1e-3, "ms")):
                real, ahead = (result.median(one.name, key) for one in sides)
                row += [f"{real / unit:.0f} {text}", f"{ahead / unit:.0f} {text}"]
                row.append(f"{ahead / real - 1:+.1%}")
                worst[key] = max(worst[key], abs(ahead / real - 1))
            rows.append(row)
    figures = {
        "memory_forecast_error_max": worst["memory"],
        "time_forecast_error_max": worst["seconds"],
    }
    return columns(rows), figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    options = arguments(__doc__, parser)
    if not options.side:
        finish(*errors(options.quick, options.rounds or (1 if options.quick else 3)))
        return
    import os

    from zero import start

    if "RANK" not in os.environ:
        statuses = [process.wait() for process in start(2)]
        if any(statuses):
            raise SystemExit("a rank failed")
        return
    layers, width = map(int, options.shape.split("x"))
    found: dict[str, Any] = rank(options.side, options.stage, layers, width)
    if os.environ["RANK"] == "0":
        emit(**found)


if __name__ == "__main__":
    main()
