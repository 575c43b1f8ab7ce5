"""Which of two forms of a layer is faster here: measured in turns, at the calibration's shapes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lezero.compress.quantize.autocast import Autocast
from lezero.compress.quantize.batches import Batch, copied
from lezero.core import device, groups
from lezero.core.decisions import Decisions
from lezero.core.interrupts import let_in

AS_IT_WAS = "as it was"
MARGIN = 0.02
_ROUNDS = 5
_SECONDS = 0.3
# Of the whole model, behind the first run.
_RUNS, _MOST_RUNS = 3, 15
_ENOUGH_S, _LONGEST_RUN_S = 1.0, 3.0


class LayerSpeed:
    """Times layers beside their quantized forms; layers of one kind and shape only once.

    `clock` is for tests.
    """

    def __init__(
        self, decisions: Decisions, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.decisions, self.clock = decisions, clock
        self._known: dict[str, tuple[float, float]] = {}

    def measure(
        self,
        label: str,
        before: Sequence[nn.Module],
        after: Sequence[nn.Module],
        xs: Sequence[Tensor],
        xs_after: Sequence[Tensor] | None = None,
    ) -> tuple[float, float]:
        """Seconds of the float layers and of the quantized ones, each on its input (xs_after: where
        those of the quantized ones lie otherwise); without hooks, which stay with the layer either
        way, under the `torch.autocast` that is on."""
        shapes = ", ".join(f"{x.dtype} {tuple(x.shape)}".removeprefix("torch.") for x in xs)
        sizes = "; ".join(_describe(module) for module in before)
        cast = Autocast.now(xs[0].device).dtype
        key = f"{sizes} on {shapes} → {label}" + (f" cast to {cast}" if cast else "")
        if key not in self._known:
            self._known[key] = in_turns(
                lambda: [module.forward(x) for module, x in zip(before, xs, strict=True)],
                lambda: [
                    module.forward(x) for module, x in zip(after, xs_after or xs, strict=True)
                ],
                {x.device for x in xs},
                self.clock,
            )
        return self._known[key]

    @staticmethod
    def is_faster(before: float, after: float) -> bool:
        """By `MARGIN`, as `keeps` asks it."""
        return after < before * (1 - MARGIN)

    def keeps(self, name: str, label: str, times: tuple[float, float]) -> bool:
        """Whether the quantized form of layer `name` is kept: it is faster by `MARGIN`."""
        chosen = self.decisions.choose(
            f"quantize {name}",
            {AS_IT_WAS: lambda: times[0], label: lambda: times[1]},
            keep=AS_IT_WAS,
            margin=MARGIN,
            why="measured at the calibration's shapes",
        )
        return chosen == label


def in_turns(
    one: Callable[[], Any],
    two: Callable[[], Any],
    places: Collection[torch.device],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """The best time of each, called in turns so that a drifting machine touches both alike.
    places: where they compute."""
    best = [float("inf"), float("inf")]
    for call in (one, two):
        call()
    began = clock()
    for turn in range(_ROUNDS * 8):
        let_in()
        order = ((0, one), (1, two)) if turn % 2 == 0 else ((1, two), (0, one))
        for place, call in order:
            device.synchronize(places)
            start = clock()
            call()
            device.synchronize(places)
            best[place] = min(best[place], clock() - start)
        if turn + 1 >= _ROUNDS and clock() - began > _SECONDS:
            break
    return best[0], best[1]


def of_the_whole(
    batch: Batch, runs: Sequence[Callable[[Batch], Any]], places: Collection[torch.device]
) -> list[float]:
    """The best time of each on copies of one batch, in turns; as often on every rank, since a model
    may communicate. Short runs are repeated for a second, so that one busy moment does not cover
    them all."""
    best = [_timed(run, batch, places) for run in runs]
    longest = groups.broadcast_object(max(best))
    enough = max(math.ceil(_ENOUGH_S / max(longest, 1e-9)), _RUNS)
    for turn in range(1 if longest > _LONGEST_RUN_S else min(enough, _MOST_RUNS)):
        for i in sorted(range(len(runs)), reverse=turn % 2 == 1):
            best[i] = min(best[i], _timed(runs[i], batch, places))
    return best


def _timed(run: Callable[[Batch], Any], batch: Batch, places: Collection[torch.device]) -> float:
    own = copied(batch)
    device.synchronize(places)
    began = time.perf_counter()
    run(own)
    device.synchronize(places)
    return time.perf_counter() - began


def _describe(module: nn.Module) -> str:
    weight = module._parameters.get("weight")
    shape = "" if weight is None else "×".join(map(str, weight.shape))
    places = [getattr(module, name, "") for name in ("stride", "padding", "dilation", "groups")]
    return f"{type(module).__name__} {shape} {places if any(places) else ''}".strip()
