"""Made-up tensors with which an operation can be run by itself."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch

from lezero.core import device
from lezero.plan.calls import Call, TensorFact
from lezero.plan.work import input_bytes

_ARENA_BYTES = 96 << 20
_MOST_SETS = 4
"""Some of what an operation takes was just written and lies in a core's caches, some does not."""


class _Arena:
    """Memory full of small positive numbers, from which float tensors are cut in turn.

    The pattern is of bfloat16; read as float32 or float64 it is small and positive as well.
    """

    def __init__(self, place: str) -> None:
        pattern = torch.linspace(0.1, 0.9, 64).to(torch.bfloat16)
        self.halves = pattern.repeat(_ARENA_BYTES // 2 // 64).to(place)
        self.at = 0

    def cut(self, fact: TensorFact) -> torch.Tensor:
        extent = 1 + sum((n - 1) * s for n, s in zip(fact.shape, fact.stride, strict=True))
        extent = max(extent, 1) * fact.dtype.itemsize
        if extent > _ARENA_BYTES:
            kinds = {"dtype": fact.dtype, "device": self.halves.device}
            return torch.empty_strided(fact.shape, fact.stride, **kinds).fill_(0.5)  # type: ignore[arg-type]
        if self.at + extent > _ARENA_BYTES:
            self.at = 0
        begin, self.at = self.at, self.at + -(-extent // 64) * 64
        piece = self.halves[begin // 2 : (begin + extent) // 2 + extent % 2]
        flat = piece.view(torch.uint8)[:extent].view(fact.dtype)
        return flat.as_strided(fact.shape, fact.stride, flat.storage_offset())


@functools.cache
def _arena(place: str) -> _Arena:
    return _Arena(place)


def release() -> None:
    """Gives the arena's memory back, what cycles still hold of it included."""
    _arena.cache_clear()
    gc.collect()
    device.empty_cache()


def argument_sets(call: Call, place: str = "cpu") -> list[tuple[list[Any], dict[str, Any]]]:
    """Sets of real arguments for the call to take in turn: other memory, the same shapes.

    `place`: the kind of device that they are on.
    """
    bytes_of_one = max(1, input_bytes(call))
    bound, arena = _index_bound(call), _arena(place)

    def make(value: Any) -> Any:
        if isinstance(value, TensorFact):
            floating = value.dtype.is_floating_point
            return arena.cut(value) if floating else _indices(value, bound).to(place)
        if isinstance(value, tuple):
            return [make(item) for item in value]
        return value

    return [
        ([make(a) for a in call.args], {k: make(v) for k, v in call.kwargs.items()})
        for _ in range(min(_MOST_SETS, max(1, _ARENA_BYTES // bytes_of_one)))
    ]


def _indices(fact: TensorFact, bound: int) -> torch.Tensor:
    tensor = torch.zeros(fact.shape, dtype=fact.dtype)
    if fact.dtype == torch.int64 and bound > 1:
        tensor.view(-1).copy_(torch.arange(tensor.numel()) * 7919 % bound)
    return tensor


def _index_bound(call: Call) -> int:
    """One more than the largest index that the integer tensors of this call may hold."""
    facts = [a for a in call.args if isinstance(a, TensorFact)]
    if call.key.startswith("aten.embedding."):
        return facts[0].shape[0]
    if call.key.startswith("aten.embedding_dense_backward"):
        return int(call.args[2])
    if call.key.startswith("aten.nll_loss"):
        return max(fact.shape[-1] for fact in facts if len(fact.shape) == 2)
    return 0
