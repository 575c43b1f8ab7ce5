"""Ops of a run as they come: which memory they read, and which module that memory is of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lezero.compress.quantize.tensors import place


class Watched(TorchDispatchMode):
    """A run of a model, inside of `with`; `inside` is the module at work, which who uses this says.

    weights: of modules; each tensor is of the last one that has it.
    """

    def __init__(self, weights: Iterable[tuple[nn.Module, Iterable[Tensor]]]) -> None:
        super().__init__()
        self.inside: nn.Module | None = None
        # By where a weight begins: a view of another part of it is made by an op, which shows.
        self._owner = {place(x): (id(x), module) for module, held in weights for x in held}
        self._owner.pop(None, None)
        # Held weakly, so that no activation outlives its use; its number is not given out again.
        self._made: dict[int, tuple[StorageWeakRef, nn.Module]] = {}

    def reads(self, leaves: Sequence[Any]) -> None:
        """Hears what an op, or whoever takes the outputs, reads."""

    def done(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Hears of an op that has run."""

    def maker(self, leaf: Any) -> nn.Module | None:
        """The module that a tensor's memory is of."""
        where = place(leaf)
        return None if where is None else self._made.get(where[0], (None, None))[1]

    def owner(self, leaf: Any) -> tuple[int, nn.Module] | None:
        """Of a weight, its id and its module."""
        return self._owner.get(place(leaf))

    def take(self, leaf: Any, module: nn.Module | None) -> None:
        """A tensor's memory is of this module from here on; None: of none."""
        where = place(leaf)
        if where is None:
            return
        if module is None:
            self._made.pop(where[0], None)
        else:
            self._made[where[0]] = (StorageWeakRef(leaf.untyped_storage()), module)

    def forget(self) -> None:
        """No memory is of any module, and none is at work."""
        self._made.clear()
        self.inside = None

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.reads(pytree.tree_leaves((args, kwargs)))
        out = function(*args, **kwargs)
        self.done(function, args, kwargs, out)
        return out
