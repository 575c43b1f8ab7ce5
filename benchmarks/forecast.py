"""Forecast against measured: peak memory and step time of real runs of the engine.

Claim: memory within 10%, time within 25%, for four sizes of model in two precisions and at
different batch shapes. Each is forecast, from operations measured afresh, and trained by
the engine, each in a process of its own, in turns. Medians over the rounds are compared: measured
are peak resident memory above imports and the median step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from _table import arguments, columns, compare, emit, finish, nothing_measured, side

SIZES: dict[str, dict[str, int]] = {
    "3M": {"vocab": 2048, "dim": 192, "layers": 5, "heads": 6, "batch": 16, "tokens": 128},
    "13M": {"vocab": 4096, "dim": 384, "layers": 6, "heads": 6, "batch": 8, "tokens": 256},
    "26M": {"vocab": 2048, "dim": 512, "layers": 8, "heads": 8, "batch": 4, "tokens": 256},
    "9M, vocabulary 32k": {
        "vocab": 32768, "dim": 192, "layers": 5, "heads": 6, "batch": 4, "tokens": 256,
    },
}  # fmt: skip
QUICK = {"3M, small batch": {**SIZES["3M"], "batch": 4, "tokens": 64}}
"""For the short form: bf16 takes seconds a step where the processor has no unit for it."""
PRECISIONS = ("fp32", "bf16")
STEPS = {"full": 12, "quick": 6}
WARM = 3


def build(shape: dict[str, int]) -> Callable[[], Any]:
    from lezero.models import Transformer, TransformerConfig

    config = TransformerConfig(
        vocab=shape["vocab"], dim=shape["dim"], layers=shape["layers"], heads=shape["heads"],
        context=shape["tokens"],
    )  # fmt: skip
    return lambda: Transformer(config)


def foreseen(shape: dict[str, int], precision: str) -> dict[str, Any]:
    from lezero.plan import StepSpec, forecast
    from lezero.train.loss import next_token_loss

    spec = StepSpec(
        batch=shape["batch"], tokens=shape["tokens"], precision=precision, loss=next_token_loss
    )
    with nothing_measured():  # each round measures for itself
        made = forecast(build(shape), spec)
    return {
        "memory": made.memory_bytes,
        "seconds": made.step_seconds,
        "took": made.made_in_seconds,
        "parameters": made.parameters,
    }


def measured(shape: dict[str, int], precision: str, steps: int) -> dict[str, float]:
    """Trains with the engine and measures; runs in a process of its own."""
    import torch
    import torch._dynamo  # part of the imports: torch loads it with the first optimizer

    from lezero.models import Transformer  # noqa: F401
    from lezero.optim import AdamW
    from lezero.profiler.memory import MemorySampler
    from lezero.train.engine import Engine
    from lezero.train.loss import next_token_loss

    size = (shape["batch"], shape["tokens"])
    generator = torch.Generator().manual_seed(0)
    seconds = []
    with MemorySampler() as memory:
        model = build(shape)()
        engine = Engine(
            model, AdamW(model), loss=next_token_loss, precision=precision, clip=1.0, compile="off"
        )
        for _ in range(steps):
            tokens = torch.randint(shape["vocab"], size, generator=generator)
            started = time.perf_counter()
            engine.train_step({"tokens": tokens, "targets": tokens.roll(-1, 1)})
            seconds.append(time.perf_counter() - started)
    return {"memory": memory.above, "seconds": statistics.median(seconds[WARM:])}


def main() -> None:
    options = arguments(__doc__, parser())
    if options.side:
        import torch

        torch.set_num_threads(options.threads)
        shape = {**SIZES, **QUICK}[options.size]
        if options.side == "forecast":
            emit(**foreseen(shape, options.precision))
        else:
            emit(**measured(shape, options.precision, options.steps))
        return
    rows = [["model", "precision", "batch", "memory", "forecast", "error", "step", "forecast",
             "error", "made in"]]  # fmt: skip
    memory_errors, time_errors = [], []
    rounds = options.rounds or (1 if options.quick else 3)
    steps = STEPS["quick" if options.quick else "full"]
    for name, shape in (QUICK if options.quick else SIZES).items():
        for precision in PRECISIONS:
            extra = ("--size", name, "--precision", precision, "--steps", str(steps))
            sides = [side(__file__, kind, *extra) for kind in ("forecast", "engine")]
            found = compare(sides, rounds=rounds, threads=options.threads)
            ahead, real = (
                {key: found.median(kind, key) for key in found.figures[kind][0]}
                for kind in ("forecast", "engine")
            )
            memory = ahead["memory"] / real["memory"] - 1
            seconds = ahead["seconds"] / real["seconds"] - 1
            memory_errors.append(abs(memory))
            time_errors.append(abs(seconds))
            rows.append([
                f"{ahead['parameters'] / 1e6:.1f}M", precision,
                f"{shape['batch']}×{shape['tokens']}",
                f"{real['memory'] / 2**20:.0f} MiB", f"{ahead['memory'] / 2**20:.0f} MiB",
                f"{memory:+.1%}", f"{real['seconds'] * 1e3:.0f} ms",
                f"{ahead['seconds'] * 1e3:.0f} ms", f"{seconds:+.1%}", f"{ahead['took']:.1f} s",
            ])  # fmt: skip
    figures = {
        "memory_error_max": round(max(memory_errors), 4),
        "time_error_max": round(max(time_errors), 4),
        "configurations": len(memory_errors),
    }
    finish(columns(rows), figures)


def parser() -> argparse.ArgumentParser:
    """Options that tell a side which configuration it is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=[*SIZES, *QUICK], help=argparse.SUPPRESS)
    parser.add_argument("--precision", choices=PRECISIONS, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
