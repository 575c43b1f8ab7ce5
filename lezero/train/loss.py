"""The loss contract, and how a batch is cut.

A loss comes from one of two places:

- `loss(model, batch)` returns the *mean* loss over the counted units of `batch`, a scalar;
- without it, the model is called as `model(**batch)` (a dict batch) or `model(batch)` and returns
  the scalar, or something with a `loss` attribute or key, as Hugging Face models do.

What counted units are is in `train/counting.py`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from lezero.core import groups
from lezero.core.device import with_doubles
from lezero.core.errors import ConfigError
from lezero.ops.cross_entropy import cross_entropy_sum
from lezero.ops.cross_entropy.reference import IGNORED
from lezero.parallel.zero import sharding_of
from lezero.train.counting import Batch, samples

LossFunction = Callable[[nn.Module, Batch], torch.Tensor]


def next_token_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy, in nats a token, of `model(tokens_BT) -> logits_BTV` on `targets_BT`.

    Computed in fp32 (fp64 for fp64 logits). Zero when no token counts, so that a fully masked
    micro-batch contributes nothing instead of NaN.
    """
    check_next_tokens(batch)
    return token_cross_entropy(model(batch["tokens"]), batch["targets"])


def check_next_tokens(batch: Batch) -> None:
    """Raises `ConfigError` when the batch lacks what `next_token_loss` reads."""
    lacks = ["tokens", "targets"]
    if isinstance(batch, Mapping):
        lacks = [name for name in lacks if name not in batch]
        given = ", ".join(map(repr, batch)) or "an empty one"
    elif isinstance(batch, torch.Tensor | np.ndarray | list | tuple):
        given = f"a {type(batch).__name__}"
    else:  # it may give them by name without being a mapping
        return
    if lacks:
        raise ConfigError(
            f"batch: got {given}; next_token_loss needs a dict with 'tokens' and 'targets' "
            f"({' and '.join(lacks)} missing). Give them, or the Engine loss=function(model, batch)"
        )


def token_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The arithmetic of `next_token_loss`: logits (B,T,V), targets (B,T) with -100 ignored."""
    flat = targets.flatten()
    total = cross_entropy_sum(logits.flatten(0, -2), flat)
    return total / (flat != IGNORED).sum().clamp(min=1)


def model_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the model itself returns."""
    output = model(**batch) if isinstance(batch, Mapping) else model(batch)
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif not isinstance(output, torch.Tensor):
        output = getattr(output, "loss", None)
    if not isinstance(output, torch.Tensor) or output.numel() != 1:
        raise ConfigError(
            "the model returned no scalar loss: return one (or an object with .loss), or give the "
            "Engine loss=function(model, batch)"
        )
    return output.squeeze()


def scalar(loss: object, trained: bool = True) -> torch.Tensor:
    """What a loss function returned, if the contract allows it; else `ConfigError`."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else loss
        raise ConfigError(
            f"loss: the loss function returned {given!s:.80}; it must return the mean loss over "
            "the batch as a tensor with one number"
        )
    if trained and not loss.requires_grad:
        raise ConfigError(
            "loss: the loss has no gradient: it does not depend on a trainable parameter, or was "
            "detached or computed under torch.no_grad()"
        )
    return loss.reshape(())


def split(batch: Batch, parts: int) -> list[Batch]:
    """`parts` micro-batches along the first dim, as even as possible, or one a sample where there
    are fewer samples; none is empty, unless the batch is.

    A list is taken as ready-made micro-batches and must have `parts` members; `ConfigError` for one
    of bare tensors alone, which may as well be one batch. In one part, a list with a bare tensor in
    it is one batch, as `evaluate` takes it. Tensors without dims go whole into each; `ConfigError`
    when the first dims of the others differ. Arrays are cut as tensors are, and so are columns:
    sequences inside the batch that hold neither, such as texts. Tuples of settings go whole into
    each (`_is_settings`).
    """
    if isinstance(batch, list) and not (parts == 1 and any(map(_is_array, batch))):
        if len(batch) != parts:
            raise ConfigError(
                f"the batch is a list of {len(batch)}, which is taken as that many ready-made "
                f"micro-batches, but accumulate={parts}. If it is one batch of inputs and labels, "
                "as a DataLoader gives them, call train_step(tuple(batch))"
            )
        if all(map(_is_array, batch)):
            raise ConfigError(
                f"the batch is a list of {len(batch)} bare tensors and accumulate={parts}, so it "
                "may be one batch of inputs and labels, as a DataLoader gives them, or ready-made "
                "micro-batches. For one batch, call train_step(tuple(batch)); make each ready-made "
                "micro-batch a dict, or a tuple: (x,) where the loss takes a bare tensor x, which "
                "is batch[0] in the loss then"
            )
        return batch
    if parts == 1:
        return [batch]
    size = samples(batch)
    parts = max(1, min(parts, size))
    bounds = [size * i // parts for i in range(parts + 1)]
    rows = [range(a, b) for a, b in itertools.pairwise(bounds)]
    return [_slice(batch, each, size, "") for each in rows]


def _slice(batch: Batch, rows: range, size: int, name: str) -> Batch:
    """`rows` of the `size` rows of everything in `batch`, which is called `name` in errors."""

    def inside(key: Any, value: Batch) -> Batch:
        return _slice(value, rows, size, f"{name}[{key!r}]" if name else repr(key))

    if isinstance(batch, torch.Tensor | np.ndarray):
        return _rows_of(batch, rows, size, name) if batch.ndim else batch
    if isinstance(batch, Mapping):
        return _like_mapping(batch, {key: inside(key, value) for key, value in batch.items()})
    if not isinstance(batch, Sequence) or isinstance(batch, str | bytes):
        return batch
    if name and _is_settings(batch, size):
        return batch
    if name and batch and not hasattr(batch, "_fields") and not _holds_arrays(batch):
        return _rows_of(batch, rows, size, name)
    return _like(batch, [inside(i, value) for i, value in enumerate(batch)])


def _is_settings(value: Sequence[Any], size: int) -> bool:
    """Whether it is a tuple of numbers and texts, such as an image size, that are not as many as
    the `size` rows. One of as many is a column, as `zip(*rows)` and `default_collate` give them:
    whole, it would go with the wrong rows without a word.
    """
    if not isinstance(value, tuple) or hasattr(value, "_fields"):
        return False
    if isinstance(value, torch.Size):
        return True
    return len(value) != size and all(isinstance(each, Number | str | bytes) for each in value)


def _rows_of(column: Any, rows: range, size: int, name: str) -> Any:
    if len(column) != size:
        raise ConfigError(
            f"the batch has {size} samples, but its {name} has {len(column)}, so it cannot be cut "
            "into micro-batches. Keep what is not one row a sample out of the batch, or give a "
            "list of ready-made micro-batches"
        )
    if isinstance(column, torch.Tensor) and column.is_nested:  # has no slices of rows
        return torch.nested.as_nested_tensor(
            list(column.unbind()[rows.start : rows.stop]), layout=column.layout
        )
    if isinstance(column, torch.Tensor) and column.is_sparse:  # nor have these
        return column.index_select(0, torch.arange(rows.start, rows.stop, device=column.device))
    if isinstance(column, torch.Tensor) and column.layout != torch.strided:
        raise ConfigError(
            f"the {name} is {str(column.layout).removeprefix('torch.')}, which cannot be "
            "cut into micro-batches; give a list of ready-made ones, or a sparse_coo tensor"
        )
    return column[rows.start : rows.stop]


def _is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    elif not isinstance(value, list | tuple):
        return _is_array(value)
    return any(map(_holds_arrays, value))


def check_batches(batches: object) -> None:
    """Raises `ConfigError` when what `evaluate` was given is one batch, as far as can be told.

    A list or tuple of tensors that are alike is one of batches, as `x.split(2)` gives them: alike
    in dtype and number of dims, and in a tuple in their sizes beyond the first dim, too.
    """
    one = isinstance(batches, Mapping | torch.Tensor | np.ndarray) or hasattr(batches, "_fields")
    if isinstance(batches, list | tuple):
        one = one or len({_kind(b, isinstance(batches, tuple)) for b in batches}) > 1
    if one:
        stacked = isinstance(batches, torch.Tensor)
        raise ConfigError(
            f"evaluate: got one batch (a {type(batches).__name__}), allowed is a list, a "
            "DataLoader or another iterable of batches: call evaluate([batch]), and "
            "evaluate([tuple(batch)]) for inputs and labels in a list"
            + (", or evaluate(x.unbind()) for batches stacked in a tensor x" if stacked else "")
        )


def _kind(value: object, sizes: bool) -> tuple[Any, ...]:
    """What tensors that are alike have in common; nothing for what is no tensor."""
    if not isinstance(value, torch.Tensor | np.ndarray):
        return ()
    return (value.dtype, value.ndim, *(value.shape[1:] if sizes else ()))


def in_step(
    batches: Iterable[Batch], model: nn.Module, stopped: Callable[[], bool]
) -> Iterator[tuple[Batch, bool]]:
    """(batch, whether it is new) of `batches` until `stopped`. Sharded parameters are gathered
    first; where every forward pass gathers them (stage 3), ranks that have fewer batches repeat
    their last one until all are through.

    Raises `ConfigError` on every rank when one of them has no batch at all and others do.
    """
    sharding = sharding_of(model)
    if sharding is None or sharding.stage < 3 or groups.world_size() == 1:
        if sharding is not None:
            sharding.gather()
        going_on = itertools.takewhile(lambda _: not stopped(), batches)
        yield from ((batch, True) for batch in going_on)
        return
    source, last, none = iter(batches), None, object()
    while True:
        batch = none if stopped() and last is not None else next(source, none)
        new = batch is not none
        last = batch if new else last
        able = last is not None
        flags = groups.all_reduce_sum(torch.tensor([int(new), int(able)]), "batches left")
        if not flags[0]:
            return
        if flags[1] < groups.world_size():
            raise ConfigError(
                "evaluate: a rank has no batch, and under stage 3 a forward pass needs every rank; "
                "give each rank one at least"
            )
        yield last, new


def mean_loss(sums: torch.Tensor) -> float | None:
    """The mean of an evaluation from its sums over all ranks: loss, counted units, ranks that were
    asked to stop, batches. None after a stop, NaN when nothing counts; `ConfigError` without a
    batch."""
    loss, counted, stopped, batches = sums
    if stopped:
        return None
    if not batches:
        raise ConfigError("evaluate: there is no batch to evaluate, on any rank")
    return float(loss / counted)


class LossSum:
    """The sum of losses, each times its count, in fp64 on `place`.

    A loss may be on another device, and on MPS, which has no fp64: it is waited for in `value`
    alone.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = torch.device("cpu") if place.type == "mps" else place
        self._parts = list[torch.Tensor]()

    def add(self, loss: torch.Tensor, count: int) -> None:
        wide = torch.float32 if loss.device.type == "mps" else torch.float64
        self._parts.append(loss.detach().to(wide) * count)

    def value(self) -> torch.Tensor:
        found = torch.zeros((), dtype=torch.float64, device=self._place)
        for part in self._parts:
            found += with_doubles(part).to(found)
        return found


def to_device(batch: Batch, place: torch.device) -> Batch:
    """The batch with every tensor on `place`; of a packed sequence those that belong there."""

    def moved(value: Any) -> Any:
        movable = isinstance(value, torch.Tensor | PackedSequence)
        return value.to(place, non_blocking=True) if movable else value

    return _each(batch, moved)


def rewrapped(batch: Batch) -> Batch:
    """The same tensors in new containers: a loss may take things out of them or put some in."""
    return _each(batch, lambda value: value)


def private(batch: Batch) -> Batch:
    """A copy of the batch for a pass that must leave it as it was, since a loss may write into it.

    Of tensors the values alone: backward ends at the copy. An object that cannot be copied (a lock,
    an open file) is handed on as it is.
    """

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        try:
            return copy.deepcopy(value)
        except Exception:
            return value

    return _each(batch, copied)


def size_of(batches: Sequence[Batch]) -> int:
    """Elements of all tensors of batches, at least 1: what the time of a step goes with, where some
    are longer than others."""
    found = 0

    def counted(value: Any) -> Any:
        nonlocal found
        values = value.data if isinstance(value, PackedSequence) else value
        found += values.numel() if isinstance(values, torch.Tensor) else 0
        return value

    for batch in batches:
        _each(batch, counted)
    return max(1, found)


def _each(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    """The batch with `change` applied to what its mappings, lists and tuples hold. A packed
    sequence, which is a tuple, is whole: it keeps its sizes on the CPU."""
    if isinstance(batch, PackedSequence):
        return change(batch)
    if isinstance(batch, Mapping):
        return _like_mapping(batch, {key: _each(value, change) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        return _like(batch, [_each(value, change) for value in batch])
    return change(batch)


def _like(batch: Any, values: list[Any]) -> Any:
    """`values` in a sequence of the batch's own type; a named tuple takes them one by one."""
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _like_mapping(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """`values` in a mapping of the batch's own type, which may give them as attributes too."""
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values
    made = copy.copy(batch)
    for key, value in values.items():  # `update` is not allowed by all
        made[key] = value
    return made
