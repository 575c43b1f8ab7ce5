"""What blocks share beside what they give out: seen op by op, as the model runs.

A block may keep a value where another finds it (on a module, in a dictionary), and another may read
one of its weights. Neither shows in what the block gives, or in what its layers are given. So every
op is watched for memory that another block has written to, and for weights of another block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lezero.compress.quantize.tensors import place

Run = Callable[..., Any]


class Leaks(TorchDispatchMode):
    """Of one run of a model, inside of `with`; each of `blocks` runs in what `within` makes of its
    forward.

    `open`: blocks of which something is read outside that they do not give out. `reaches_blocks`:
    whether that is so before the last block has ended. `weights`: ids of parameters that are read
    outside of their block.
    """

    supports_higher_order_operators = True

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.open: set[nn.Module] = set()
        self.weights: set[int] = set()
        self.reaches_blocks = False
        # By where a weight begins: a view of another part of it is made by an op, which shows.
        self._owner = {place(x): (id(x), block) for block in blocks for x in block.parameters()}
        self._owner.pop(None, None)
        # Held weakly, so that no activation outlives its use; its number is not given out again.
        self._made: dict[int, tuple[StorageWeakRef, nn.Module]] = {}
        self._inside: nn.Module | None = None

    def within(self, block: nn.Module, forward: Run, leaves: Callable[[Any], Iterator[Any]]) -> Run:
        """`forward` as what `block` does. leaves: of an output."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._in(block):
                output = forward(*args, **kwargs)
            for leaf in leaves(output):
                where = place(leaf)
                if where is not None:
                    self._made.pop(where[0], None)
            self.reaches_blocks = bool(self.open)
            return output

        return run

    def given_out(self, tensors: Sequence[Any]) -> None:
        """The model's outputs, which whoever called it reads."""
        self._read(tensors)

    @contextmanager
    def _in(self, block: nn.Module) -> Iterator[None]:
        outside, self._inside = self._inside, block
        try:
            yield
        finally:
            self._inside = outside

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = pytree.tree_leaves((args, kwargs))
        self._read(given)
        result = function(*args, **kwargs)
        held = {where[0] for where in map(place, given) if where is not None}
        made = [x for x in pytree.tree_leaves(result) if (place(x) or (None,))[0] not in held]
        self._write([*made, *_written(function, args, kwargs)])
        return result

    def _read(self, leaves: Sequence[Any]) -> None:
        for where in map(place, leaves):
            if where is None:
                continue
            _, maker = self._made.get(where[0], (None, self._inside))
            if maker is not None and maker is not self._inside:
                self.open.add(maker)
            weight, owner = self._owner.get(where, (0, self._inside))
            if owner is not self._inside:
                self.weights.add(weight)

    def _write(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            where = place(leaf)
            if where is None:
                continue
            if self._inside is None:
                self._made.pop(where[0], None)
            else:
                self._made[where[0]] = (StorageWeakRef(leaf.untyped_storage()), self._inside)


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What of its arguments an op writes to."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = dict(zip((about.name for about in schema.arguments), args, strict=False)) | {**kwargs}
    return pytree.tree_leaves(
        [named.get(about.name) for about in schema.arguments if about.is_write]
    )
