"""How outputs of int8 convolutions lie in memory, when speed is what is asked for.

oneDNN computes them channels last, so that outputs which follow contiguous images are turned at
each layer. Where the float model computes the same with its convolutions' outputs channels last
(none of its code goes on with `.view`), layers are timed on inputs that lie so, and in the end the
whole model both ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lezero.compress.quantize.agreed import agreed
from lezero.compress.quantize.batches import Batch, call, comparable, copied, given
from lezero.compress.quantize.hessians import Sites
from lezero.compress.quantize.layer import relative_error
from lezero.compress.quantize.modules import QuantizedConv
from lezero.compress.quantize.speed import MARGIN, in_turns
from lezero.compress.quantize.weights import CodedWeight
from lezero.core import device
from lezero.core.decisions import Decisions

FOLLOW, LAST = "as the inputs lie", "channels last"
TOPIC = "outputs of int8 convolutions"
_ALIKE = 0.02  # relative: sums in another order, of which some then round to another code
_Laid = list[tuple[CodedWeight, Tensor]]


class ConvOutputs:
    """Tries them channels last in `model`: as inputs where layers are timed, and in the end."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._possible = False

    def ask(self, batch: Batch, sites: Sites) -> None:
        """Whether the float model computes the same so."""
        turning = [
            user.module
            for site, target in sites
            if target.activations == "tensor" and _turns(site.weight())
            for user in site.users
        ]
        self._possible = bool(turning) and self._alike(batch, lambda: _turned(turning))

    def inputs(self, layers: Sequence[nn.Module], xs: Sequence[Tensor]) -> list[Tensor]:
        """What layers with the inputs xs are given where all outputs lie so."""
        return [
            x.contiguous(memory_format=torch.channels_last)
            if self._possible and isinstance(layer, QuantizedConv) and x.dim() == 4
            else x
            for layer, x in zip(layers, xs, strict=True)
        ]

    def decide(self, batch: Batch, decisions: Decisions) -> None:
        """Times the quantized model both ways, and leaves it the faster one."""
        laid = _laid(self.model.modules()) if self._possible else []
        if not laid or not self._alike(batch, lambda: _swapped(laid)):
            return

        def run() -> None:
            given(self.model, copied(batch))

        def run_swapped() -> None:
            with _swapped(laid):
                run()

        @cache
        def seconds() -> tuple[float, float]:
            return in_turns(run, run_swapped, device.places(self.model))

        chosen = decisions.choose(
            TOPIC,
            {FOLLOW: lambda: seconds()[0], LAST: lambda: seconds()[1]},
            keep=FOLLOW,
            margin=MARGIN,
            why="one batch through the whole model",
        )
        for weight, codes in laid if chosen == LAST else ():
            weight.codes = codes

    def _alike(self, batch: Batch, turned: Callable[[], AbstractContextManager[None]]) -> bool:
        """Whether the model gives the same inside of `turned()`; on every rank what rank 0 says."""

        def alike() -> float:
            wanted = comparable(call(self.model, batch))
            try:
                with turned():
                    found = comparable(call(self.model, batch))
            except Exception:  # a model's own code raises what it wants
                return 0.0
            return float(_same(wanted, found))

        return agreed(alike) > 0


def _turns(weight: Tensor) -> bool:
    """Whether outputs for contiguous images lie otherwise with this weight channels last."""
    wide = weight.dim() == 4 and weight.shape[1] > 1 and math.prod(weight.shape[2:]) > 1
    return wide and not weight.is_contiguous(memory_format=torch.channels_last)


def _laid(layers: Iterable[nn.Module]) -> _Laid:
    """The weights that there are to lay channels last, with their codes so."""
    static = [m for m in layers if isinstance(m, QuantizedConv) and m.input_scale is not None]
    weights = {id(m.weight): m.weight for m in static}.values()
    return [
        (weight, weight.codes.contiguous(memory_format=torch.channels_last))
        for weight in weights
        if isinstance(weight, CodedWeight) and _turns(weight.codes)
    ]


@contextmanager
def _swapped(laid: _Laid) -> Iterator[None]:
    """With these codes in the places of the weights' own. Both stay, since what oneDNN makes of
    codes is kept with them."""
    before = [weight.codes for weight, _ in laid]
    try:
        for weight, codes in laid:
            weight.codes = codes
        yield
    finally:
        for (weight, _), codes in zip(laid, before, strict=True):
            weight.codes = codes


@contextmanager
def _turned(convs: Sequence[nn.Module]) -> Iterator[None]:
    """With the outputs of these channels last."""

    def turn(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        return y.contiguous(memory_format=torch.channels_last) if y.dim() == 4 else y

    hooks = [conv.register_forward_hook(turn) for conv in convs]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _same(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    """Whether both are outputs of one shape and nearly one value; nothing at all proves nothing."""
    return (
        bool(wanted)
        and [x.shape for x in wanted] == [x.shape for x in found]
        and all(relative_error(x, y) <= _ALIKE for x, y in zip(wanted, found, strict=True))
    )
