"""Runs a model up to one of its blocks, again and again, without computing those before it.

Calibration goes through the blocks in order: the inputs of block k come from the quantized blocks
before it. `Replay` calls the model itself with a batch; blocks before k only hand on what was
stored of them, and behind block k the run is cut off. So masks, positions and whatever else a model
computes between its blocks are right without knowing them, and no more is held than one block
needs.

[Note: which outputs are stored]
What block k - 1 gave, and the last block of each list of blocks (a decoder reads the encoder's).
The others hand on zeros of the right shape, which take no memory. Whether block k then gets the
inputs that it gets in an ordinary run is checked bit for bit on the first batch before anything is
changed; a model with other paths between its blocks (skip connections) computes all blocks before k
each time instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lezero.compress.quantize.batches import Batch, Reached, call, first_call
from lezero.compress.quantize.spill import Spill

Run = Callable[..., Any]


class Replay:
    """`blocks`: (name, module) in the order in which `model` calls them, each once.

    `is_chain`: whether stored outputs are enough, see [Note: which outputs are stored].
    """

    def __init__(
        self,
        model: nn.Module,
        batches: list[Batch],
        blocks: list[tuple[str, nn.Module]],
        spill: Spill,
    ) -> None:
        self.model, self.batches, self.spill = model, batches, spill
        self.blocks = self._in_order(blocks)
        self.is_chain = True
        if self.blocks:
            self.is_chain = self._check()

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
            except Reached:
                return True
        return False

    def _stored(self, batch: int, block: int) -> Run:
        def hand_on(*args: Any, **kwargs: Any) -> Any:
            if (batch, block) in self.spill:
                return self.spill.get((batch, block))
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
        """The blocks that the model calls, in that order; none when one is called twice."""
        self._shapes: dict[tuple[int, int], Any] = {}
        order: list[int] = []
        self._digests: list[str] = []

        def noting(index: int, forward: Run) -> Run:
            def note(*args: Any, **kwargs: Any) -> Any:
                order.append(index)
                self._digests.append(_digest((args, kwargs)))
                return forward(*args, **kwargs)

            return note

        self.blocks = blocks
        with self._replaced({k: noting(k, m.forward) for k, (_, m) in enumerate(blocks)}):
            call(self.model, self.batches[0])
        return [] if len(set(order)) < len(order) else [blocks[index] for index in order]

    def _check(self) -> bool:
        """Walks the first batch through the unchanged blocks by replay, comparing their inputs."""
        same = True

        for index, (_, module) in enumerate(self.blocks):
            forward = module.forward

            def visit(*args: Any, index: int = index, forward: Run = forward, **kwargs: Any) -> Any:
                nonlocal same
                same = same and _digest((args, kwargs)) == self._digests[index]
                return forward(*args, **kwargs)

            try:
                same = self.run(0, index, visit) and same
            except Exception:  # zeros led a path between the blocks astray
                same = False
            if not same:
                break
        for index in range(len(self.blocks)):
            self.spill.drop((0, index))
        return same

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


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
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
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            flat = leaf.detach().contiguous().flatten()
            made.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
            made.update(flat.view(torch.uint8).cpu().numpy().data)
    return made.hexdigest()
