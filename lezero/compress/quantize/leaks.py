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
from torch.utils import _pytree as pytree

from lezero.compress.quantize.tensors import place
from lezero.compress.quantize.watched import Watched

Run = Callable[..., Any]


class Leaks(Watched):
    """Of one run of a model, inside of `with`; each of `blocks` runs in what `within` makes of its
    forward.

    `open`: blocks of which something is read outside that they do not give out. `reaches_blocks`:
    whether that is so before the last block has ended. `weights`: ids of parameters that are read
    outside of their block.
    """

    supports_higher_order_operators = True

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__((block, block.parameters()) for block in blocks)
        self.open: set[nn.Module] = set()
        self.weights: set[int] = set()
        self.reaches_blocks = False

    def within(self, block: nn.Module, forward: Run, leaves: Callable[[Any], Iterator[Any]]) -> Run:
        """`forward` as what `block` does. leaves: of an output."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._in(block):
                output = forward(*args, **kwargs)
            for leaf in leaves(output):
                self.take(leaf, None)
            self.reaches_blocks = bool(self.open)
            return output

        return run

    @contextmanager
    def _in(self, block: nn.Module) -> Iterator[None]:
        outside, self.inside = self.inside, block
        try:
            yield
        finally:
            self.inside = outside

    def reads(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            maker = self.maker(leaf)
            if maker is not None and maker is not self.inside:
                self.open.add(maker)
            owned = self.owner(leaf)
            if owned is not None and owned[1] is not self.inside:
                self.weights.add(owned[0])

    def done(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        given = map(place, pytree.tree_leaves((args, kwargs)))
        held = {where[0] for where in given if where is not None}
        made = [x for x in pytree.tree_leaves(out) if (place(x) or (None,))[0] not in held]
        for leaf in (*made, *_written(function, args, kwargs)):
            self.take(leaf, self.inside)


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What of its arguments an op writes to."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = dict(zip((about.name for about in schema.arguments), args, strict=False)) | {**kwargs}
    return pytree.tree_leaves(
        [named.get(about.name) for about in schema.arguments if about.is_write]
    )
