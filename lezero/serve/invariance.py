"""What it costs that a request's bits do not depend on its neighbours.

The engine has one form of a step: each row's products are summed in one order, however many rows
there are. A library may choose another kernel for each number of rows instead. So the products of
the model's layers are timed, for a few numbers of rows, with the engine's kernels and with torch's
own linear, which promises no such thing, in fp32 and in bf16 where the processor has it.

Both go through the first matrices of the model, as many as `_BYTES` hold in fp32, so that small
caches do not hold them. With one row reading them takes the time, of which int8 has a quarter; so
a ratio below 1 does not say that invariance is free, but that these kernels are quicker with it
than torch is without. The step also takes keys in ranges of a fixed length, which is not timed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from lezero.core.facts import cpu
from lezero.ops.decoder import Weight
from lezero.serve.fused import FusedProgram
from lezero.serve.merged import multiply
from lezero.serve.program import Program

ROWS = (1, 16, 256)
"""One request that decodes, 16 of them, and a prompt."""
_BYTES = 128 << 20
_PRODUCTS = 1 << 31
_REPEATS = 3


@dataclass(frozen=True)
class Cost:
    """Seconds of the same products for so many rows; other: torch's fastest form, and its."""

    rows: int
    seconds: float
    other_s: float
    other: str

    @property
    def ratio(self) -> float:
        """Above 1, bits that do not depend on neighbours cost time; below, they cost none."""
        return self.seconds / self.other_s


def invariance_costs(program: Program) -> list[Cost]:
    """What the products cost on this machine now, in a second or two; nothing for a program whose
    bits depend on neighbours, or that has no kernels of its own."""
    if not isinstance(program, FusedProgram):
        return []
    matrices = [weight for layer in program.matrices() for weight in layer]
    forms = {"fp32": torch.float32}
    if cpu().native_bf16:
        forms["bf16"] = torch.bfloat16
    return [
        _cost(_some(matrices, rows), rows, forms, program.prompts_apart and rows == max(ROWS))
        for rows in ROWS
    ]


def cost_lines(costs: list[Cost]) -> list[str]:
    """For people; nothing without costs, where the forecast says why."""
    if not costs:
        return []
    each = ", ".join(f"{x.ratio:.2f} for {_said(x.rows)} ({x.other})" for x in costs)
    dear = [_said(cost.rows) for cost in costs if cost.ratio > 1]
    return [
        f"invariance  time of products over torch's own, which is not invariant: {each}",
        f"            so it costs time for {', '.join(dear)}" if dear else "            no cost",
    ]


def _said(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def _some(matrices: list[Weight], rows: int) -> list[Weight]:
    """The first of them, within bounds of memory and of time."""
    most = min(_BYTES // 4, _PRODUCTS // rows)
    sizes = itertools.accumulate(w.out_features * w.in_features for w in matrices)
    return matrices[: max(1, sum(size <= most for size in sizes))]


def _cost(
    matrices: list[Weight], rows: int, forms: dict[str, torch.dtype], prompt: bool = False
) -> Cost:
    """Medians over turns in which every form runs once. prompt: ours as prompts are multiplied."""
    ways = {"": _ours(matrices, rows, prompt)}
    ways |= {name: _torchs(matrices, rows, dtype) for name, dtype in forms.items()}
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(_REPEATS + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            with torch.inference_mode():
                way()
            if turn:  # the first one builds and warms
                took[name].append(time.perf_counter() - began)
    middle = {name: statistics.median(times) for name, times in took.items()}
    own = middle.pop("")
    best = min(middle, key=lambda name: middle[name])
    return Cost(rows, own, middle[best], f"torch {best}")


def _ours(matrices: list[Weight], rows: int, prompt: bool) -> Callable[[], None]:
    here: Any = {"dtype": torch.bfloat16 if prompt else torch.float32, "device": "cpu"}
    pairs = [(torch.randn(rows, weight.in_features, **here), weight) for weight in matrices]

    def run() -> None:
        for x_RK, weight in pairs:
            multiply(x_RK, weight, rounded=prompt)

    return run


def _torchs(matrices: list[Weight], rows: int, dtype: torch.dtype) -> Callable[[], None]:
    here: Any = {"dtype": dtype, "device": "cpu"}
    pairs = [
        (
            torch.randn(rows, weight.in_features, **here),
            torch.randn(weight.out_features, weight.in_features, **here),
        )
        for weight in matrices
    ]

    def run() -> None:
        for x_RK, w_NK in pairs:
            F.linear(x_RK, w_NK)

    return run
