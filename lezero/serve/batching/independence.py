"""Whether the rows of a module see each other, which would mix the answers of clients.

[Note: drawn neighbours] An example is often all zeros or ones, and rows that are equal hide what
they take from each other: attention over two equal keys gives what it gives over one. So rows are
compared alone and beside others that differ, all in one step: the example's further rows, and some
that are made, in which floating numbers are drawn and whole ones trade places with each other, the
least with the largest and so on. On a CPU whole ones are also mirrored between the least and the
largest, with 0 and 1, so that constant ones change too; mirrored in the second half alone, as a
mask of padding; and halved to 1 or more, as lengths. A module may refuse such inputs, lengths of 0
or types of a vocabulary of 1 for example, so each kind, and each whole input, is also changed
alone. On an accelerator an index out of range is no refusal: it ends all work of the process there,
so nothing but numbers of the example is tried, and should a place not take another place's number,
the server must not start.

[Note: shared masks] A module may go another way where all masks are full or all lengths equal,
which a step with rows of all these kinds never takes. So for each group of whole inputs that some
row shares with the example, one such row is also compared with the example on both of its sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

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


def check_rows(
    run: Run,
    examples: Sequence[Row],
    coarseness: float,
    runs_on_cpu: Callable[[], bool] = lambda: True,
) -> None:
    """Raises `ConfigError` where a row's answer depends on who is beside it, and where the module
    fails on the first example itself. See [Note: drawn neighbours].

    examples: rows of equal shapes, at least one. coarseness: the relative rounding step of the
    module's parameters. runs_on_cpu: whether all is computed there; asked once it has run.
    """
    example, *others = examples[: 1 + _FURTHER]
    try:
        (found,) = run([example])
    except ConfigError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        if len(examples) > 1 and _runs(run, examples):
            raise ConfigError(
                f"module: fails on the example's first row alone ({problem}); rows must be "
                "answerable one by one"
            ) from error
        raise ConfigError(f"module: fails on its example ({problem})") from error
    try:
        twice = run([example, example])
    except ConfigError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"module: fails on its example's first row twice in a step ({problem}); requests share "
            "steps, so dim 0 must take any size"
        ) from error
    for beside in twice:
        compare(found, beside, coarseness)
    on_cpu = runs_on_cpu()
    # All made while the device surely works.
    further, drawn = list(_further(example, others)), _drawn(example)
    wholes = list(_other_whole(example, on_cpu))
    alone = _Alone(run, example, found)
    for row in (*further, *drawn):
        alone.takes(row)
    base = drawn[0] if drawn and drawn[0] in alone else example
    for whole in wholes:
        if not alone.takes(base | whole) and base is not example:
            alone.takes(example | whole)
    compared = alone.compare(coarseness)
    same = [name for name in example if all(row[name] is example[name] for row in compared)]
    if same:
        why = "only the example's numbers are tried on an accelerator"
        if on_cpu:
            why = "the module refused all others that were tried; if it takes some all the same"
        _LOG.warning(
            "rows may depend on each other through %s: %s, give an example whose rows differ",
            *(", ".join(same), why),
        )
    if not on_cpu and alone.refused:
        _check_survival(run, example)


def _runs(run: Run, rows: Sequence[Row]) -> bool:
    try:
        run(rows)
    except Exception:
        return False
    return True


class _Alone:
    """What a module gives for rows one by one. Rows that it refuses are left out."""

    def __init__(self, run: Run, first: Row, found: Row) -> None:
        self._run = run
        self._found = [(first, found)]
        self.refused = False

    def __contains__(self, row: Row) -> bool:
        return any(taken is row for taken, _ in self._found)

    def takes(self, row: Row) -> bool:
        found = self._answers([row])
        self._found += [(row, found[0])] if found else []
        return bool(found)

    def compare(self, coarseness: float) -> list[Row]:
        """The rows that were compared with what they give beside others: all at once, or where the
        module refuses that, each beside the first. Raises `ConfigError` where they differ.

        Forwards and backwards: what takes dim 0 for time shows the first what it is alone.
        """
        first, *others = self._found
        for batches in ([self._found], [[first, other] for other in others]):
            sound = [x for x in batches if all(self._is_sound(y, coarseness) for y in (x, x[::-1]))]
            if sound:
                break
        if sound and sound[0] is self._found:
            for other in self._sharing():
                self._is_sound([first, other, first], coarseness)
        return [row for rows in sound for row, _ in rows]

    def _sharing(self) -> Iterable[tuple[Row, Row]]:
        """One row for each group of whole inputs that are the first row's; see
        [Note: shared masks]."""
        first, *others = self._found
        found: dict[frozenset[str], tuple[Row, Row]] = {}
        for row, answer in others:
            shared = (n for n, x in row.items() if x is first[0][n] and not _floats(x))
            found.setdefault(frozenset(shared), (row, answer))
        found.pop(frozenset(), None)
        return found.values()

    def _is_sound(self, rows: list[tuple[Row, Row]], coarseness: float) -> bool:
        """False where the module refuses them."""
        answers = self._answers([row for row, _ in rows])
        if answers is None:
            return False
        for (_, alone), beside in zip(rows, answers, strict=True):
            compare(alone, beside, coarseness)
        return True

    def _answers(self, rows: Sequence[Row]) -> Sequence[Row] | None:
        try:
            return self._run(rows)
        except ConfigError:
            raise
        except Exception:
            self.refused = True
            return None


def compare(alone: Row, beside: Row, coarseness: float) -> None:
    """Raises `ConfigError` where a row's answer beside others is not what it is alone."""
    if beside.keys() != alone.keys():
        raise ConfigError("module: gives other outputs for other rows, so they cannot share a step")
    for name, x in alone.items():
        if not _same(x, beside[name], coarseness):
            raise ConfigError(
                f"module: the rows of {name} depend on each other (batch statistics, attention "
                "over the batch, a length that follows the longest row, or dim 0 taken for time, "
                "as by nn.LSTM without batch_first), so requests cannot share a step"
            )


def _check_survival(run: Run, example: Row) -> None:
    """Refuses a module whose device stopped at one of the inputs that were tried."""
    try:
        run([example])
    except Exception as error:
        raise ConfigError(
            "module: its device stopped at other numbers than the example's, or its own in other "
            f"places; give an example of numbers that all places of an input take ({error})"
        ) from error


def _further(example: Row, others: Sequence[Row]) -> Iterator[Row]:
    """The example's own rows; inputs that are equal to the first's are the same tensor."""
    for other in others:
        differs = {n: x for n, x in other.items() if not torch.equal(x, example[n])}
        if differs:
            yield example | differs


def _drawn(example: Row) -> list[Row]:
    """Rows of other floating numbers, if it has such: of both signs, as images have them from 0 to
    1, and as they have them to 255. What takes its scale from the whole batch shows by those."""
    draw = torch.Generator().manual_seed(0)
    floats = {name: x for name, x in example.items() if _floats(x)}

    def row(numbers: Callable[..., Tensor], times: float) -> Row:
        drawn = {n: numbers(x.shape, generator=draw, device="cpu") for n, x in floats.items()}
        return example | {n: (times * x).to(floats[n]) for n, x in drawn.items()}

    kinds = ((torch.randn, 1.0), (torch.randn, 1.0), (torch.rand, 1.0), (torch.rand, 255.0))
    return [row(*kind) for kind in kinds] if floats else []


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
