"""Runs a model up to one of its blocks, again and again, without computing those before it.

Calibration goes through the blocks in order: the inputs of block k come from the quantized blocks
before it. `Replay` calls the model itself with a batch; blocks before k only hand on what was
stored of them, and behind block k the run is cut off. So masks, positions and whatever else a model
computes between its blocks are right without knowing them, and no more is held than one block
needs.

[Note: which outputs are stored]
What block k - 1 gave, and the last block of each list of blocks (a decoder reads the encoder's).
The others hand on zeros of the right shape, which take no memory. Whether block k then gets and
gives what it does in an ordinary run is checked bit for bit, before anything is changed, on the
first batch and on each that has other arguments than those before it; a model with other paths
between its blocks (skip connections) computes all blocks before k each time instead. So does one
whose blocks give back a dataclass, whose tensors are not stored one by one, or are given or give
back an object that they may write to: what they write is not stored. And so does one whose blocks
read what another keeps (on a module, in a dictionary), which would be of the last batch that went
through that one. Tensors are seen as they are read (`leaks.py`); of numbers the check tells, which
goes block by block through two batches at least, as calibration does.

[Note: what blocks may write to]
Dataclasses, partials and bound methods are looked into: they are values like others as long as the
first batch of each kind leaves what they hold as it was. Any other object that is neither a tensor,
a module, a function nor a constant is taken for one that blocks write to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lezero.compress.quantize.batches import (
    Batch,
    Reached,
    call,
    first_call,
    plain,
    tensors_of,
)
from lezero.compress.quantize.capture import Capture
from lezero.compress.quantize.leaks import Leaks
from lezero.compress.quantize.spill import Spill
from lezero.compress.quantize.tensors import is_dense, raw
from lezero.nn.modes import uncompiled

Run = Callable[..., Any]
_VALUES = (bool, int, float, complex, str, bytes, slice, range, Enum, torch.Size, np.generic)
_NAMES = (torch.dtype, torch.device, torch.layout, type, FunctionType, BuiltinFunctionType)
_PLAIN = (Tensor, nn.Module, *_VALUES, *_NAMES)


class Replay:
    """`blocks`: (name, module) in the order in which `model` calls them, each once.

    `is_chain`: whether stored outputs are enough, see [Note: which outputs are stored].
    `why_no_chain`: the reason where they are not, for a report.
    `state`: the class of an object that blocks may write to, see [Note: what blocks may write to];
    none is run twice with it. Empty where there is none.
    `open`: blocks of which others read more than they give out. `read_elsewhere`: ids of parameters
    that are read outside of their block.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: list[Batch],
        blocks: list[tuple[str, nn.Module]],
        spill: Spill,
    ) -> None:
        self.model, self.batches, self.spill = model, batches, spill
        self.state = self.why_no_chain = ""
        self.open: set[nn.Module] = set()
        self.read_elsewhere: set[int] = set()
        self.blocks = self._in_order(blocks)
        if self.state:
            self.why_no_chain = f"blocks share an object that they may write to ({self.state})"
        for batch in _unlike(batches, shapes=True) if self.blocks else ():
            self._watch(batch)
        self.is_chain = not self.why_no_chain
        if self.is_chain and self.blocks and not self._check():
            self.is_chain = False
            self.why_no_chain = "blocks read more than what the block before them gave"

    def run(self, batch: int, block: int, visit: Run, *, store: bool = True) -> bool:
        """Calls `visit(*args, **kwargs)` with what block number `block` is given for a batch; what
        it returns, the block's output, is stored for the blocks after it, unless not to `store`.
        False: the batch does not come to this block (an expert without a token, a tower that reads
        images and gets none)."""

        def last(*args: Any, **kwargs: Any) -> Any:
            output = visit(*args, **kwargs)
            if store and self.is_chain:
                self._store(batch, block, output)
            raise Reached

        earlier = range(block) if self.is_chain else ()
        forwards = {block: last, **{k: self._stored(batch, k) for k in earlier}}
        with self._replaced(forwards):
            try:
                if block == 0:  # the model sees a batch for the first time
                    first_call(self.model, self.batches[batch], batch)
                else:
                    call(self.model, self.batches[batch])
            except _Left:
                return False
            except Reached:
                return True
        return False

    def _stored(self, batch: int, block: int) -> Run:
        def hand_on(*args: Any, **kwargs: Any) -> Any:
            if (batch, block) in self.spill:
                return self.spill.get((batch, block))
            if (batch, block) not in self._shapes:  # the batch left the model before this block
                raise _Left
            return pytree.tree_map(_blank, self._shapes[batch, block])

        return hand_on

    def _store(self, batch: int, block: int, output: Any) -> None:
        self._shapes[batch, block] = pytree.tree_map(_shape, output)
        self.spill.put((batch, block), output)
        if block and not self._ends_list(block - 1):
            self.spill.drop((batch, block - 1))

    def _ends_list(self, block: int) -> bool:
        name, after = self.blocks[block][0], self.blocks[block + 1][0]
        return name.rpartition(".")[0] != after.rpartition(".")[0]

    def _in_order(self, blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
        """The blocks that the first batch comes to, in that order; none when a batch comes to one
        of them twice, or in another order. Batches of the same shapes go the same way."""
        self._shapes: dict[tuple[int, int], Any] = {}
        self._walks: dict[int, dict[int, tuple[str, str]]] = {}
        self.blocks = blocks
        ways = [self._walk(batch) for batch in _unlike(self.batches, shapes=True)]
        if len(ways) == 1 < len(self.batches):
            ways.append(self._walk(1))
        first = ways[0]
        for way in ways:
            here = set(way)
            if [k for k in way if k in first] != [k for k in first if k in here]:
                return []
        if len(set(first)) < len(first):
            return []
        place = {index: at for at, index in enumerate(first)}
        for batch, seen in self._walks.items():
            self._walks[batch] = {place[k]: seen[k] for k in seen if k in place}
        return [blocks[index] for index in first]

    def _walk(self, batch: int) -> list[int]:
        """The blocks that a batch comes to, one after the other; notes digests of what they get and
        give."""
        order: list[int] = []
        seen = self._walks[batch] = {}

        def noting(index: int, forward: Run) -> Run:
            def note(*args: Any, **kwargs: Any) -> Any:
                order.append(index)
                given = _digest((args, kwargs))
                held = [(x, list(_leaves(x))) for x in _objects((args, kwargs))]
                output = forward(*args, **kwargs)
                seen[index] = given, _digest(output)
                self.state = self.state or _opaque((args, kwargs, output)) or _written(held)
                for made in _objects(output):
                    self.why_no_chain = f"blocks give back an object ({type(made).__name__})"
                return output

            return note

        forwards = {k: noting(k, m.forward) for k, (_, m) in enumerate(self.blocks)}
        with self._replaced(forwards):
            first_call(self.model, self.batches[batch], batch)
        return order

    def _watch(self, batch: int) -> None:
        """Runs a batch that was run before: what blocks make once, and keep for all, is there."""
        leaks = Leaks([module for _, module in self.blocks])
        forwards = {
            k: leaks.within(module, module.forward, _leaves)
            for k, (_, module) in enumerate(self.blocks)
        }
        with self._replaced(forwards), uncompiled(), leaks:
            leaks.reads(tensors_of(call(self.model, self.batches[batch])))
        self.open |= leaks.open
        self.read_elsewhere |= leaks.weights
        if leaks.reaches_blocks and not self.why_no_chain:
            self.why_no_chain = "blocks read values that another keeps"

    def _check(self) -> bool:
        """Walks batches through the unchanged blocks by replay, comparing what these get and give:
        the first of each kind, and one more, side by side."""
        other = list(self._walks)[-1]
        batches = dict.fromkeys([*_unlike(self.batches, shapes=False), other])
        same = all(
            self._repeats(batch, index) for index in range(len(self.blocks)) for batch in batches
        )
        for batch in batches:
            for index in range(len(self.blocks)):
                self.spill.drop((batch, index))
        return same

    def _repeats(self, batch: int, index: int) -> bool:
        """Whether a block gets and gives by replay what it did in an ordinary run."""
        forward = self.blocks[index][1].forward
        seen: list[tuple[str, str]] = []

        def visit(*args: Any, **kwargs: Any) -> Any:
            given = _digest((args, kwargs))
            output = forward(*args, **kwargs)
            seen.append((given, _digest(output)))
            return output

        try:
            self.run(batch, index, visit)
        except Exception:  # zeros led a path between the blocks astray
            return False
        wanted = self._walks[batch]
        return seen == ([wanted[index]] if index in wanted else [])

    @contextmanager
    def _replaced(self, forwards: dict[int, Run]) -> Iterator[None]:
        """Blocks compute `forwards` instead of their own."""
        modules = {index: self.blocks[index][1] for index in forwards}
        before = {index: module.__dict__.get("forward") for index, module in modules.items()}
        for index, module in modules.items():
            module.__dict__["forward"] = forwards[index]
        try:
            yield
        finally:
            for index, module in modules.items():
                if before[index] is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = before[index]


class _Left(Reached):
    """A run came to a block whose output is not there: values led the batch past it before."""


class OneBlock:
    """Block number `index` of a replay: `module`, run again and again on what it is given."""

    def __init__(self, replay: Replay, index: int) -> None:
        self.replay, self.index, self.module = replay, index, replay.blocks[index][1]

    def run(self, visit: Run, *, store: bool = False) -> None:
        """`visit` in the place of the block, with each batch."""
        for batch in range(len(self.replay.batches)):
            self.replay.run(batch, self.index, visit, store=store)

    def watch(self, capture: Capture) -> Capture:
        """Shows `capture` what its layers are given, which is returned."""
        forward = self.module.forward

        def look(*args: Any, **kwargs: Any) -> Any:
            with capture.watching(self.module):
                return forward(*args, **kwargs)

        self.run(look)
        return capture


def _unlike(batches: list[Batch], *, shapes: bool) -> list[int]:
    """The first batch of each kind of arguments: their names, types and values, of tensors dtype
    and dims and, with `shapes`, sizes."""

    def about(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        return f"{leaf.dtype} {tuple(leaf.shape) if shapes else leaf.dim()}"

    kinds: dict[str, int] = {}
    for index, batch in enumerate(batches):
        leaves, tree = pytree.tree_flatten(plain(batch))
        kinds.setdefault(f"{tree} {[about(leaf) for leaf in leaves]}", index)
    return list(kinds.values())


def _opaque(tree: Any) -> str:
    """The class of something in it that is neither a tensor nor a value that nobody writes to."""
    unknown = (x for x in _leaves(tree) if x is not None and not isinstance(x, _PLAIN))
    return next((type(x).__name__ for x in unknown), "")


def _written(held: list[tuple[Any, list[Any]]]) -> str:
    """The class of one of these objects that no longer holds what is beside it."""
    for x, before in held:
        now = list(_leaves(x))
        if len(now) != len(before) or not all(map(is_, now, before)):
            return type(x).__name__
    return ""


def _objects(tree: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(tree) if _parts(leaf) is not None]


def _leaves(tree: Any, above: frozenset[int] = frozenset()) -> Iterator[Any]:
    """What a tree is made of, down through containers and objects that can be looked into."""
    for leaf in pytree.tree_leaves(tree):
        parts = _parts(leaf)
        if parts is None:
            yield leaf
        elif id(leaf) not in above:  # one may hold itself
            yield from _leaves(parts, above | {id(leaf)})


def _parts(leaf: Any) -> Any:
    """What a dataclass, a partial or a bound method holds; of anything else `None`."""
    if isinstance(leaf, _PLAIN):
        return None
    own = getattr(leaf, "__dict__", {})
    if is_dataclass(leaf):
        return list(({x.name: getattr(leaf, x.name, None) for x in fields(leaf)} | own).values())
    if isinstance(leaf, partial):
        return [leaf.func, leaf.args, leaf.keywords, *own.values()]
    return [leaf.__self__] if isinstance(leaf, MethodType) else None


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and is_dense(leaf):
        return _Blank(tuple(leaf.shape), leaf.dtype, leaf.device)
    return leaf


class _Blank:
    """The shape of a tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device


def _blank(leaf: Any) -> Any:
    if not isinstance(leaf, _Blank):
        return leaf
    return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)


def _digest(tree: Any) -> str:
    """Of the tensors in a tree, bit for bit."""
    made = hashlib.blake2b(digest_size=16)
    for leaf in _leaves(tree):
        if isinstance(leaf, Tensor):
            made.update(f"{tuple(leaf.shape)}{leaf.dtype}{leaf.layout}".encode())
            for part in raw(leaf):
                made.update(part.cpu().numpy().data)
    return made.hexdigest()
