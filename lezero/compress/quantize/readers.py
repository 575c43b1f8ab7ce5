"""Who reads convolutions, their outputs and their weights: seen op by op, as the model runs.

That the outputs of a model stay when a batch norm is multiplied into the convolution before it says
little: where something else reads the convolution too, its part in the outputs may be small beside
the rest (a score between 0 and 1 beside boxes in pixels). So every op is watched for the memory
that a convolution gave out, views of it too, and for its weight and bias, which it alone may read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lezero.compress.quantize.batches import tensors_of
from lezero.compress.quantize.watched import Watched


class Readers(Watched):
    """What the convolutions and batch norms of a model have to do with each other, over the runs
    inside of `watching`."""

    def __init__(self, convs: Sequence[nn.Module], norms: Sequence[nn.Module]) -> None:
        super().__init__((conv, conv.parameters(False)) for conv in convs)
        self.convs, self.norms = convs, norms
        # None stands for all that is neither.
        self._of: dict[nn.Module, set[nn.Module | None]] = defaultdict(set)
        self._sources: dict[nn.Module, set[nn.Module | None]] = defaultdict(set)

    def pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """Convolutions that one batch norm alone reads, which reads nothing else."""
        found = []
        for norm, (conv, *others) in self._sources.items():
            if conv is not None and not others and self._of[conv] == {norm}:
                found.append((conv, norm))
        return found

    @contextmanager
    def watching(self) -> Iterator[Callable[[Any], None]]:
        """Runs of the model inside of it count; gives a function for the outputs of each."""
        hooks = [conv.register_forward_hook(self._convolved, prepend=True) for conv in self.convs]
        hooks += [conv.register_forward_pre_hook(self._enter) for conv in self.convs]
        hooks += [norm.register_forward_pre_hook(self._begin) for norm in self.norms]
        hooks += [norm.register_forward_hook(self._end, prepend=True) for norm in self.norms]
        try:
            with self:
                yield self._given_out
        finally:
            self.forget()
            for hook in hooks:
                hook.remove()

    def reads(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            conv = self.maker(leaf)
            if conv is not None:
                self._of[conv].add(self.inside)
            owned = self.owner(leaf)
            if owned is not None and owned[1] is not self.inside:
                self._of[owned[1]].add(None)

    def _enter(self, conv: nn.Module, args: Any) -> None:
        self.inside = conv

    def _convolved(self, conv: nn.Module, args: Any, output: Tensor) -> None:
        self.inside = None
        self.take(output, conv)

    def _begin(self, norm: nn.Module, args: Any) -> None:
        self._sources[norm].add(self.maker(args[0]) if args else None)
        self.inside = norm

    def _end(self, norm: nn.Module, args: Any, output: Any) -> None:
        self.inside = None

    def _given_out(self, outputs: Any) -> None:
        self.reads(tensors_of(outputs))
        for storage, conv in self._made.values():
            if not storage.expired():  # somebody has kept it, to read it later
                self._of[conv].add(None)
