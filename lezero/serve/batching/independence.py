"""Whether the rows of a module see each other, which would mix the answers of clients.

[Note: drawn neighbours] An example is often all zeros or ones, and rows that are equal hide what
they take from each other: attention over two equal keys gives what it gives over one. So rows are
compared alone and beside others that differ: the example's further rows, and some that are made,
in which floating numbers are drawn and whole ones trade places with each other, the least with the
largest and so on. On a CPU whole ones are also mirrored between the least and the largest, with 0
and 1, so that constant ones change too; mirrored in the second half alone, as a mask of padding;
and halved to 1 or more, as lengths. A module may refuse such inputs, lengths of 0 or types of a
vocabulary of 1 for example, so each kind, and each whole input, is also changed alone. On an
accelerator an index out of range is no refusal: it ends all work of the process there, so nothing
but numbers of the example is tried, and should a place not take another place's number, the server
must not start.
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
_FURTHER = 8
"""Rows of the example that are compared at most."""


def check_rows(run: Run, examples: Sequence[Row], coarseness: float, on_cpu: bool = True) -> None:
    """Raises `ConfigError` where a row's answer depends on who is beside it, and where the module
    fails on the first example itself. See [Note: drawn neighbours].

    examples: rows of equal shapes, at least one. coarseness: the relative rounding step of the
    module's parameters. on_cpu: whether the module and its inputs are there.
    """
    example, *others = examples[: 1 + _FURTHER]
    try:
        for rows in ([example], [example, example]):
            run(rows)
    except ConfigError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"module: fails on its example ({problem})") from error
    # All made while the device surely works.
    pairs = [*_further(example, others), *_pairs(example, on_cpu)]
    seen = [_check(run, row, other, coarseness) for row, other in pairs]
    taken = [pair for pair, was_taken in zip(pairs, seen, strict=True) if was_taken]
    same = [name for name in example if all(a[name] is b[name] for a, b in taken)]
    if same:
        _LOG.warning(
            "rows may depend on each other through %s: the module takes no other numbers of it "
            "that were tried, or it is on an accelerator, where only the example's are; give an "
            "example whose rows differ",
            ", ".join(same),
        )
    if not (on_cpu or all(seen)):
        _check_survival(run, example)


def _check(run: Run, row: Row, other: Row, coarseness: float) -> bool:
    """False where the module refuses them.

    The row comes first and last: what takes dim 0 for time shows the first what it is alone.
    """
    try:
        alone = run([row])[0]
        placed = [run([row, other])[0], run([other, other, row])[2]]
    except ConfigError:
        raise
    except Exception:
        return False
    if any(beside.keys() != alone.keys() for beside in placed):
        raise ConfigError("module: gives other outputs for other rows, so they cannot share a step")
    for name, x in alone.items():
        if not all(_same(x, beside[name], coarseness) for beside in placed):
            raise ConfigError(
                f"module: the rows of {name} depend on each other (batch statistics, attention "
                "over the batch, a length that follows the longest row, or dim 0 taken for time, "
                "as by nn.LSTM without batch_first), so requests cannot share a step"
            )
    return True


def _check_survival(run: Run, example: Row) -> None:
    """Refuses a module whose device stopped at one of the inputs that were tried."""
    try:
        run([example])
    except Exception as error:
        raise ConfigError(
            "module: its device stopped at other numbers than the example's, or its own in other "
            f"places; give an example of numbers that all places of an input take ({error})"
        ) from error


def _further(example: Row, others: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """The same of the example's own rows."""
    for other in others:
        differs = {n: x for n, x in other.items() if not torch.equal(x, example[n])}
        if differs:
            yield example, example | differs
            yield example | differs, example


def _pairs(example: Row, on_cpu: bool) -> Iterator[tuple[Row, Row]]:
    """A row, and what is put beside it; inputs that are equal are the same tensor."""
    draw = torch.Generator().manual_seed(0)
    floats = {name: x for name, x in example.items() if _floats(x)}
    first, second = (
        {n: torch.randn(x.shape, generator=draw, device="cpu").to(x) for n, x in floats.items()}
        for _ in range(2)
    )
    if first:
        yield example, example | first
        yield example | first, example | second
    for whole in _other_whole(example, on_cpu):
        if first:
            yield example, example | first | whole
            yield example | first | whole, example | second
        yield example, example | whole
        yield example | whole, example


def _other_whole(example: Row, on_cpu: bool) -> Iterator[Row]:
    """Other numbers for whole inputs, for one or more at a time."""
    whole = {name: x for name, x in example.items() if not _floats(x)}
    traded = {name: _traded(x) for name, x in whole.items() if len(x.long().unique()) > 1}
    if traded:
        yield traded
    if on_cpu and whole:
        mirrored = {name: _mirrored(x) for name, x in whole.items()}
        yield mirrored
        if len(mirrored) > 1:
            yield from ({name: x} for name, x in mirrored.items())
        for name, x in whole.items():
            for changed in (_padded(x), _halved(x)):
                if not torch.equal(changed, x):
                    yield {name: changed}


def _floats(x: Tensor) -> bool:
    return x.dtype.is_floating_point


def _traded(x: Tensor) -> Tensor:
    """The example's own numbers: the least for the largest, the second for the second largest."""
    values, places = x.long().unique(return_inverse=True)
    return values.flip(0)[places].to(x.dtype)


def _mirrored(x: Tensor) -> Tensor:
    if x.dtype == torch.bool:
        return ~x
    wide = x.long()
    return (wide.min().clamp(max=0) + wide.max().clamp(min=1) - wide).to(x.dtype)


def _padded(x: Tensor) -> Tensor:
    half = x.numel() // 2 or 1
    return torch.cat([x.flatten()[:half], _mirrored(x).flatten()[half:]]).view(x.shape)


def _halved(x: Tensor) -> Tensor:
    return (x.long() // 2).clamp(min=1).to(x.dtype)


def _same(alone: Tensor, beside: Tensor, coarseness: float) -> bool:
    """Equal but for rounding, whose size comes from the largest numbers of a row."""
    if alone.shape != beside.shape:
        return False
    kind = torch.complex128 if alone.is_complex() else torch.float64
    if _floats(alone):
        coarseness = max(coarseness, torch.finfo(alone.dtype).eps)
    a, b = alone.to(kind), beside.to(kind)
    largest = a.abs().nan_to_num(0, 0, 0).max().item() if a.numel() else 0.0
    few_steps = max(1e-3, 4 * coarseness) * largest
    return torch.allclose(a, b, rtol=1e-2, atol=few_steps, equal_nan=True)
