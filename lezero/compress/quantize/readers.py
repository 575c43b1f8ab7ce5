"""Who reads convolutions, their outputs and their weights: seen op by op, as the model runs.

That the outputs of a model stay when a batch norm is multiplied into the convolution before it says
little: where something else reads the convolution too, its part in the outputs may be small beside
the rest (a score between 0 and 1 beside boxes in pixels). So every op is watched for the memory
that a convolution gave out, views of it too, and for its weight and bias, which it alone may read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lezero.compress.quantize.batches import tensors_of
from lezero.compress.quantize.tensors import place


class Readers(TorchDispatchMode):
    """What the convolutions and batch norms of a model have to do with each other, over the runs
    inside of `watching`."""

    def __init__(self, convs: Sequence[nn.Module], norms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.convs, self.norms = convs, norms
        # None stands for all that is neither.
        self._of: dict[nn.Module, set[nn.Module | None]] = defaultdict(set)
        self._sources: dict[nn.Module, set[nn.Module | None]] = defaultdict(set)
        # Held weakly, so that no activation outlives its use; its number is not given out again.
        self._made: dict[int, tuple[StorageWeakRef, nn.Module]] = {}
        self._inside: nn.Module | None = None
        # By where a weight begins: a view of another part of it is made by an op, which shows.
        self._owner = {place(weight): conv for conv in convs for weight in conv.parameters(False)}
        self._owner.pop(None, None)

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
            self._made.clear()
            self._inside = None
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._note(pytree.tree_leaves((args, kwargs)), self._inside)
        return function(*args, **kwargs)

    def _note(self, leaves: Sequence[Any], reader: nn.Module | None) -> None:
        for leaf in leaves:
            conv = self._maker(leaf)
            if conv is not None:
                self._of[conv].add(reader)
            owner = self._owner.get(place(leaf))
            if owner is not None and owner is not reader:
                self._of[owner].add(None)

    def _maker(self, leaf: Any) -> nn.Module | None:
        """The convolution whose outputs' memory a tensor is of."""
        where = place(leaf)
        found = None if where is None else self._made.get(where[0])
        return None if found is None else found[1]

    def _enter(self, conv: nn.Module, args: Any) -> None:
        self._inside = conv

    def _convolved(self, conv: nn.Module, args: Any, output: Tensor) -> None:
        self._inside = None
        memory = output.untyped_storage()
        self._made[memory._cdata] = (StorageWeakRef(memory), conv)

    def _begin(self, norm: nn.Module, args: Any) -> None:
        self._sources[norm].add(self._maker(args[0]) if args else None)
        self._inside = norm

    def _end(self, norm: nn.Module, args: Any, output: Any) -> None:
        self._inside = None

    def _given_out(self, outputs: Any) -> None:
        self._note(tensors_of(outputs), None)
