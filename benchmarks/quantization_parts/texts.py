"""Text that every Python ships, in tokens, and what is measured of a language model."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor


def windows(encode: Callable[[str], list[int]], count: int, length: int, held: bool) -> Tensor:
    """(count, length) tokens of the language reference: the last third of it is held out."""
    names = sorted(topics)
    cut = len(names) * 2 // 3
    tokens = encode("\n\n".join(topics[name] for name in (names[cut:] if held else names[:cut])))
    count = min(count, len(tokens) // length)
    return torch.tensor(tokens[: count * length]).view(count, length)


@torch.no_grad()
def perplexity(model: Callable[[Tensor], Any], rows: Tensor, at_once: int = 4) -> float:
    """exp of the mean loss of the next token over (R, T) tokens."""
    total = 0.0
    for some in rows.split(at_once):
        found = model(some)
        logits = found if isinstance(found, Tensor) else found.logits
        flat = logits[:, :-1].float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(flat, some[:, 1:].flatten(), reduction="sum")
        total += float(loss)
    return math.exp(total / (rows.shape[0] * (rows.shape[1] - 1)))


@torch.no_grad()
def seconds(work: Callable[[], Any], repeats: int, *, in_turns: bool = False) -> float:
    """Median of `repeats` calls after one that does not count, or of one a turn after another that
    does not: caches are others' when a turn begins."""
    calls: Iterable[Any] = range(repeats)
    if in_turns:
        from _turns import turns  # only a side in turns can: others may not see this folder

        calls = turns()
    work()
    times = []
    for _ in calls:
        if in_turns:
            work()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def tensors_in(model: torch.nn.Module) -> int:
    """Bytes of parameters and buffers, each once; those inside tensor subclasses too."""
    found: dict[int, Tensor] = {}

    def collect(tensor: Tensor) -> None:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            found[tensor.data_ptr()] = tensor
            return
        for name in flatten()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                collect(inner)

    for tensor in [*model.parameters(), *model.buffers()]:
        collect(tensor)
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())


def packaged(package: str, pattern: str) -> Path:
    """A file that an installed package ships; `FileNotFoundError` says how to get it."""
    from importlib.util import find_spec

    spec = find_spec(package)
    for folder in spec.submodule_search_locations or [] if spec is not None else []:
        for path in sorted(Path(folder).rglob(pattern)):
            return path
    raise FileNotFoundError(f"pip install --no-deps {package.replace('_', '-')}")
