"""What a run of a block shows: its outputs, and some of what each layer in it was given.

Outputs alone prove little of a layer whose part in them is nothing, or next to it: an expert that
is computed and multiplied by zero, an adapter that begins with zeros. What enters a layer shows
whatever becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lezero.compress.quantize.tensors import place

_ROWS = 32  # that are kept of each call: so many tokens say as much as all of them
Given = dict[nn.Module, list[Tensor]]


@dataclass(frozen=True)
class Evidence:
    """outputs: of the block. given: rows of the inputs of its layers with weights, call by call."""

    outputs: list[Tensor]
    given: Given


@contextmanager
def noting(layers: Iterable[nn.Module]) -> Iterator[Given]:
    """Fills what it gives with rows of what enters those of `layers` that have weights."""
    given: Given = {layer: [] for layer in layers if any(True for _ in layer.parameters(False))}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
            rows = x.detach().reshape(-1, x.shape[-1] if x.dim() else 1)
            step = max(1, len(rows) // _ROWS)
            given[layer].append(rows[::step][:_ROWS].clone())

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in given]
    try:
        yield given
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def outliving(layers: Iterable[nn.Module]) -> Iterator[set[tuple[nn.Module, str]]]:
    """Fills what it gives, as it ends, with each of `layers` whose "input" or "output" somebody
    still holds then: the model on one of its modules, a hook. Their values may be read later."""
    held: list[tuple[nn.Module, str, StorageWeakRef]] = []
    kept: set[tuple[nn.Module, str]] = set()

    def note(layer: nn.Module, which: str, leaf: Any) -> None:
        if place(leaf) is not None:
            held.append((layer, which, StorageWeakRef(leaf.untyped_storage())))

    def called(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        note(layer, "input", args[0] if args else next(iter(kwargs.values()), None))
        note(layer, "output", out)

    hooks = [layer.register_forward_hook(called, with_kwargs=True) for layer in {*layers}]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()
    kept.update((layer, which) for layer, which, storage in held if not storage.expired())


def gather(layers: Iterable[nn.Module], run: Callable[[], list[Tensor]]) -> Evidence:
    """What `run`, which gives the outputs, shows of `layers`."""
    with noting(layers) as given:
        return Evidence(run(), given)
