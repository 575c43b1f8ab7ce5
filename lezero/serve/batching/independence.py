"""Whether the rows of a module see each other, which would mix the answers of clients.

[Note: drawn neighbours] An example is often all zeros or ones, and rows that are equal hide what
they take from each other: attention over two equal keys gives what it gives over one. So rows are
compared alone and beside others that differ: floating numbers are drawn, whole ones mirrored
between the least and the largest of the example (with 0 and 1, so that tokens stay in a
vocabulary). A module may refuse such inputs, lengths of 0 for example, so each kind is also changed
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lezero.core.errors import ConfigError
from lezero.core.log import logger

Row = dict[str, Tensor]
"""Tensors by name, each without the batch dim."""
Run = Callable[[Sequence[Row]], Sequence[Row]]
_LOG = logger("serve")


def check_rows(run: Run, example: Row, coarseness: float) -> None:
    """Raises `ConfigError` where a row's answer depends on who is beside it, and where the module
    fails on the example itself. See [Note: drawn neighbours].

    coarseness: the relative rounding step of the module's parameters.
    """
    try:
        for rows in ([example], [example, example]):
            run(rows)
    except ConfigError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"module: fails on its example ({problem})") from error
    seen = [_check(run, row, other, coarseness) for row, other in _pairs(example)]
    if not any(seen):
        _LOG.warning("the module takes no rows but its example's; they may depend on each other")


def _check(run: Run, row: Row, other: Row, coarseness: float) -> bool:
    """False where the module refuses them."""
    try:
        alone, beside = run([row])[0], run([row, other])[0]
    except ConfigError:
        raise
    except Exception:
        return False
    for name, x in alone.items():
        if not _same(x, beside[name], coarseness):
            raise ConfigError(
                f"module: the rows of {name} depend on each other (batch statistics, or "
                "attention over the batch), so requests cannot share a step"
            )
    return True


def _pairs(example: Row) -> Iterator[tuple[Row, Row]]:
    """A row, and what is put beside it."""
    draw = torch.Generator().manual_seed(0)
    whole = {name: _mirrored(x) for name, x in example.items() if not _floats(x)}
    first, second = (
        {n: torch.randn(x.shape, generator=draw).to(x) for n, x in example.items() if _floats(x)}
        for _ in range(2)
    )
    if first and whole:
        yield example, example | first | whole
        yield example | first | whole, example | second
    if first:
        yield example, example | first
        yield example | first, example | second
    if whole:
        yield example, example | whole
        yield example | whole, example


def _floats(x: Tensor) -> bool:
    return x.dtype.is_floating_point


def _mirrored(x: Tensor) -> Tensor:
    if x.dtype == torch.bool:
        return ~x
    wide = x.long()
    return (wide.min().clamp(max=0) + wide.max().clamp(min=1) - wide).to(x.dtype)


def _same(alone: Tensor, beside: Tensor, coarseness: float) -> bool:
    """Equal but for rounding, whose size comes from the largest numbers of a row."""
    kind = torch.complex128 if alone.is_complex() else torch.float64
    if _floats(alone):
        coarseness = max(coarseness, torch.finfo(alone.dtype).eps)
    a, b = alone.to(kind), beside.to(kind)
    largest = a.abs().nan_to_num(0, 0, 0).max().item() if a.numel() else 0.0
    few_steps = max(1e-3, 4 * coarseness) * largest
    return torch.allclose(a, b, rtol=1e-2, atol=few_steps, equal_nan=True)
