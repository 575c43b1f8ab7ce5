"""Calibration data: batches, and how a model is called with one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lezero.compress.quantize.tensors import nbytes
from lezero.core.errors import ConfigError, LeZeroError
from lezero.core.facts import memory
from lezero.core.interrupts import let_in, passed_on_at
from lezero.nn.modes import OWN_STATISTICS, evaluating
from lezero.report.units import size

Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]
_MOST = 4096  # batches of data that is not in memory yet
_PRIME = 2**61 - 1


def read_batches(data: Any) -> list[Batch]:
    """`data` as batches, each checked.

    A tensor, a tuple of arguments or a mapping of keyword arguments is one batch; any other
    iterable gives batches of these kinds, where a list of arguments (a `DataLoader`'s) counts as a
    tuple. Raises `ConfigError` for anything else, and where there is nothing in it, or no end.
    """
    if _is_batch(data):
        batches = [data]
    elif isinstance(data, Iterable) and not isinstance(data, str | bytes):
        batches = _drawn(data)
    else:
        raise ConfigError(f"data: got {type(data).__name__}, allowed are batches: {_ALLOWED}")
    if not batches:
        raise ConfigError("data: there is no batch in it; calibration needs at least one")
    for index, batch in enumerate(batches):
        if not _is_batch(batch):
            raise ConfigError(
                f"data: batch {index} is a {type(batch).__name__}, allowed is {_ALLOWED}"
            )
        tensors = _tensors(batch)
        if not tensors and pytree.tree_leaves(plain(batch)):
            raise ConfigError(
                f"data: batch {index} holds no tensor, but {_kinds(batch)}; convert arrays and "
                "lists: return_tensors='pt' of a tokenizer, torch.as_tensor(…)"
            )
        if not tensors or any(tensor.numel() == 0 for tensor in tensors):
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise ConfigError(
                f"data: batch {index} is empty (tensors of {shapes}); leave it out, or let the "
                "loader drop its last one"
            )
    return batches


_ALLOWED = "a tensor, a tuple or list of arguments, or a mapping of keyword arguments"


def _drawn(data: Iterable[Any]) -> list[Any]:
    """All that `data` gives. A training loader never ends, or gives more than memory holds."""
    if isinstance(data, Sequence):  # in memory already
        return [tuple(batch) if isinstance(batch, list) else batch for batch in data]
    batches: list[Any] = []
    taken, count = 0, _length(data)
    room = memory().available // 2 or math.inf
    for batch in data:
        batches.append(tuple(batch) if isinstance(batch, list) else batch)
        taken += sum(map(nbytes, _tensors(batch)))
        if max(len(batches), count) > _MOST or taken > room:
            more = f"of {count:,}" if count else "and has no end yet"
            raise ConfigError(
                f"data: gave {len(batches):,} batches ({size(taken)}) {more}, which are more than "
                "fit; some hundred sequences are enough: give itertools.islice(data, 64), or a list"
            )
    return batches


def _length(data: Any) -> int:
    """How many batches `data` says that it has; 0: it does not say."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):  # a DataLoader over a stream has a len() that raises
        return 0


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(plain(batch)) if isinstance(leaf, Tensor)]


def _kinds(batch: Any) -> str:
    parts = plain(batch)
    values = parts.values() if isinstance(parts, dict) else parts
    return ", ".join(dict.fromkeys(type(value).__name__ for value in values))


def copied(batch: Batch) -> Batch:
    """The batch in memory of its own, for a model that works in place on what it is given; tensors
    that are one stay one."""
    made: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = leaf.detach().clone()
        return made[id(leaf)]

    found: Batch = pytree.tree_map(copy, plain(batch))
    return found


def call(model: nn.Module, batch: Batch) -> Any:
    """What the model gives for one batch, which stays what it is."""
    return given(model, copied(batch))


def given(model: nn.Module, batch: Batch) -> Any:
    """What the model gives for one batch, which it may write to."""
    let_in()
    with passed_on_at(2):
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple) else model(batch)


class Reached(Exception):
    """Cuts a run off behind the part of the model that was asked for."""


def first_call(model: nn.Module, batch: Batch, index: int = 0) -> Any:
    """`call`, with an error that speaks of the calibration data when the model refuses it."""
    try:
        return call(model, batch)
    except (LeZeroError, Reached):
        raise
    except Exception as error:
        shapes = pytree.tree_map(
            lambda leaf: f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else leaf,
            plain(batch),
        )
        raise ConfigError(
            f"data: the model does not take batch {index}, {shapes}: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error


def tensors_of(output: Any) -> list[Tensor]:
    """The floating-point tensors of a model's output, in order; a complex one as pairs (…, 2)."""
    return [x for x in map(_real, _leaves(output)) if _is_floating(x)]


def comparable(output: Any) -> list[Tensor]:
    """All that the output says, as real tensors: integers and numbers too. Nothing where it says
    anything that could hide a change (an array, an object): two such outputs prove nothing. Nothing
    without a floating-point tensor either."""
    leaves = [_real(leaf) for leaf in _leaves(output)]
    if not any(map(_is_floating, leaves)):
        return []
    if not all(isinstance(x, Tensor | None | bool | int | float | complex | str) for x in leaves):
        return []
    said = (leaf for leaf in leaves if leaf is not None and not isinstance(leaf, str))
    return [leaf if isinstance(leaf, Tensor) else _as_tensor(leaf) for leaf in said]


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _as_tensor(number: complex) -> Tensor:
    if isinstance(number, int):
        return torch.tensor(number % _PRIME, device="cpu")  # which 64 bits hold
    parts = [float(part) for part in (number.real, number.imag)]
    return torch.tensor(parts, dtype=torch.float64, device="cpu")


def _real(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_complex():
        return torch.view_as_real(leaf.resolve_conj())
    return leaf


def _leaves(output: Any) -> Iterator[Any]:
    """What an output is made of, down through containers, dataclasses and outputs of libraries."""
    if isinstance(output, Tensor):
        yield output
        return
    if isinstance(output, Mapping):
        parts = list(output.values())
    elif is_dataclass(output) and not isinstance(output, type):
        parts = [getattr(output, field.name) for field in fields(output)]
    elif hasattr(output, "to_tuple"):
        parts = list(output.to_tuple())
    else:
        parts = pytree.tree_leaves(output, is_leaf=lambda part: part is not output)
    for part in parts:
        if part is output:
            yield part
        else:
            yield from _leaves(part)


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, no KV cache, no nested tensors, random state untouched, no weights
    that autocast holds; all put back afterwards."""
    # Parts have configs of their own (a decoder has a copy). With a cache a block run twice would
    # see its own keys of the first time.
    configs = {id(c): c for part in model.modules() if (c := getattr(part, "config", None))}
    cached = [(c, c.use_cache) for c in configs.values() if _can_switch(c)]
    # Quantized layers take no nested tensors, so they are compared with what is computed without.
    nested: list[Any] = [m for m in model.modules() if getattr(m, "use_nested_tensor", False)]
    holds_weights = torch.is_autocast_cache_enabled()
    places = sorted({x.device.index for x in model.parameters() if x.is_cuda})
    try:
        # Weights change here, and what autocast made of them would stay.
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)
        for part in nested:
            part.use_nested_tensor = False
        for config, _ in cached:
            config.use_cache = False
        # What is made here may be trained around later, whatever mode the caller is in.
        with (
            evaluating(model, OWN_STATISTICS),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.random.fork_rng(devices=places),
        ):
            yield
    finally:
        for part in nested:
            part.use_nested_tensor = True
        torch.set_autocast_cache_enabled(holds_weights)
        torch.clear_autocast_cache()
        for config, before in cached:
            config.use_cache = before


def _can_switch(config: Any) -> bool:
    """Whether it has a `use_cache` that can be set: a frozen record's cannot."""
    if not hasattr(config, "use_cache"):
        return False
    try:
        config.use_cache = config.use_cache
    except Exception:
        return False
    return True


def _is_batch(data: Any) -> bool:
    return isinstance(data, Tensor | tuple | Mapping)


def plain(batch: Any) -> Any:
    """Mappings of other libraries (a tokenizer's, a model's output) as plain dictionaries."""
    return dict(batch) if isinstance(batch, Mapping) else batch
