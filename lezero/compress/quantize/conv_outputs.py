"""How outputs of int8 convolutions lie in memory, when speed is what is asked for.

oneDNN computes them channels last, so that outputs which follow contiguous images are turned at
each layer. Where the float model gives the same with its convolutions' outputs channels last (none
of its code goes on with `.view`), and what it gives lies as before, layers are timed on inputs that
lie so, and in the end the whole model both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lezero.compress.quantize.agreed import agreed
from lezero.compress.quantize.batches import Batch, call, comparable, given, plain
from lezero.compress.quantize.hessians import Sites
from lezero.compress.quantize.layer import relative_error
from lezero.compress.quantize.modules import QuantizedConv
from lezero.compress.quantize.report import QuantizationReport
from lezero.compress.quantize.speed import MARGIN, of_the_whole
from lezero.compress.quantize.weights import CodedWeight
from lezero.core import device
from lezero.profiler.untouched import restored

FOLLOW, LAST = "as the inputs lie", "channels last"
TOPIC = "outputs of int8 convolutions"
# Relative, where nothing but the order of sums is another: of floats, and of codes, of which some
# then round to others.
_SAME, _SAME_IN_16_BITS, _SAME_CODES = 1e-4, 0.02, 0.02
_KINDS = 4  # of shapes, that are looked at
_NO, _LIES_OTHERWISE, _YES = 0.0, 1.0, 2.0


class ConvOutputs:
    """Tries them channels last in `model`: as inputs where layers are timed, and in the end."""

    def __init__(self, model: nn.Module, report: QuantizationReport) -> None:
        self.model, self.report = model, report
        self._batches: list[Batch] = []
        """One of each kind of shapes, where it is possible."""

    def ask(self, batches: Sequence[Batch], sites: Sites) -> None:
        """Whether the float model computes the same so."""
        turning = [
            user.module
            for site, target in sites
            if target.activations == "tensor" and site.weight().dim() == 4
            for user in site.users
        ]
        if not turning:
            return
        kinds = list({repr(_shapes(batch)): batch for batch in reversed(batches)}.values())
        found = self._tried(kinds[-_KINDS:][::-1], lambda: _turned(turning), _of_floats)
        if found == _YES:
            self._batches = kinds[-_KINDS:][::-1]
        elif found == _LIES_OTHERWISE:
            self.report.notes.append(
                "convolutions may be faster where their outputs lie channels last, but those of "
                "the model would too: model.to(memory_format=torch.channels_last) allows it"
            )

    def inputs(self, layers: Sequence[nn.Module], xs: Sequence[Tensor]) -> list[Tensor]:
        """What layers with the inputs xs are given where all outputs lie so."""
        return [
            x.contiguous(memory_format=torch.channels_last)
            if self._batches and isinstance(layer, QuantizedConv) and x.dim() == 4
            else x
            for layer, x in zip(layers, xs, strict=True)
        ]

    def decide(self) -> None:
        """Times the quantized model both ways, and leaves it the faster one."""
        weights = _weights(self.model.modules()) if self._batches else []
        if (
            not weights
            or self._tried(self._batches, lambda: _laid(weights), lambda _: _SAME_CODES) != _YES
        ):
            return

        def run(batch: Batch) -> None:
            given(self.model, batch)

        def run_laid(batch: Batch) -> None:
            with _laid(weights):
                run(batch)

        places = device.places(self.model)
        follow, last = of_the_whole(self._batches[0], [run, run_laid], places)
        chosen = self.report.decisions.choose(
            TOPIC,
            {FOLLOW: lambda: follow, LAST: lambda: last},
            keep=FOLLOW,
            margin=MARGIN,
            why="one batch through the whole model",
        )
        if chosen == LAST:
            for weight in weights:
                weight.channels_last = True
            self.report.notes.append(
                f"{TOPIC} lie channels last inside of the model, which is faster; "
                "model.to(memory_format=torch.contiguous_format) lays them as torch's"
            )

    def _tried(
        self,
        batches: Sequence[Batch],
        turned: Callable[[], AbstractContextManager[None]],
        most: Callable[[Tensor], float],
    ) -> float:
        """Whether the model gives the same inside of `turned()`; on every rank what rank 0 says."""

        def one(batch: Batch) -> float:
            wanted = comparable(call(self.model, batch))
            found = self._run(batch, turned)
            if found is None:
                return _NO
            if not wanted or [x.shape for x in wanted] != [x.shape for x in found]:
                return _NO
            pairs = list(zip(wanted, found, strict=True))
            if any(_differ(x, y) > most(x) for x, y in pairs):
                return _NO
            return _YES if all(x.stride() == y.stride() for x, y in pairs) else _LIES_OTHERWISE

        def of_all() -> float:
            return min(one(batch) for batch in [*batches, *self._doubled(batches)])

        return agreed(of_all)

    def _doubled(self, batches: Sequence[Batch]) -> list[Batch]:
        """Those of one sample twice, where the model takes that: code that needs contiguous outputs
        may do without them in a batch of one."""
        made = []
        for batch in batches:
            leaves = [x for x in pytree.tree_leaves(plain(batch)) if isinstance(x, Tensor)]
            if not leaves or any(not x.dim() or len(x) != 1 for x in leaves):
                continue
            twice = pytree.tree_map(
                lambda x: torch.cat([x, x]) if isinstance(x, Tensor) else x, plain(batch)
            )
            if self._run(twice, nullcontext) is not None:
                made.append(twice)
        return made

    def _run(
        self, batch: Batch, inside: Callable[[], AbstractContextManager[None]]
    ) -> list[Tensor] | None:
        """What the model gives; None where it raises, which leaves nothing behind in it."""
        with restored(list(self.model.modules())):
            try:
                with inside():
                    return comparable(call(self.model, batch))
            except Exception:  # a model's own code raises what it wants
                return None


def _differ(x: Tensor, y: Tensor) -> float:
    """The relative error, of integers the share of others."""
    if x.is_floating_point():
        return relative_error(x, y)
    return float((x != y).float().mean()) if x.numel() else 0.0


def _of_floats(x: Tensor) -> float:
    return _SAME if x.itemsize > 2 else _SAME_IN_16_BITS


def _shapes(batch: Batch) -> Any:
    return pytree.tree_map(lambda x: x.shape if isinstance(x, Tensor) else x, plain(batch))


def _weights(layers: Iterable[nn.Module]) -> list[CodedWeight]:
    """Those that there are to lay channels last."""
    static = [m for m in layers if isinstance(m, QuantizedConv) and m.input_scale is not None]
    found = {id(m.weight): m.weight for m in static if isinstance(m.weight, CodedWeight)}
    return [x for x in found.values() if len(x.full_shape) == 4 and not x.channels_last]


@contextmanager
def _laid(weights: Sequence[CodedWeight]) -> Iterator[None]:
    try:
        for weight in weights:
            weight.channels_last = True
        yield
    finally:
        for weight in weights:
            weight.channels_last = False


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
