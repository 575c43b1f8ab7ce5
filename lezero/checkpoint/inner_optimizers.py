"""Optimizers inside of an optimizer, as wrappers keep them, and what such classes keep besides.

A wrapper (two optimizers in one, Lookahead) holds others in its attributes, each with state of its
own, which `optimizer.state` of the wrapper does not show. They are known by where they are: `a` for
`self.a`, `parts.0` for `self.parts[0]`; their tensors are `optimizer/.inner/<where>/…`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor
from torch.optim import Optimizer

from lezero.checkpoint.shared_state import pack_shared, warn_of
from lezero.core.groups import is_main
from lezero.core.log import logger

_INNER = ".inner/"
_log = logger("checkpoint")


def inner_optimizers(optimizer: Optimizer, parameters: Iterable[Tensor]) -> dict[str, Optimizer]:
    """Those inside, at any depth, that hold some of `parameters` and keep anything themselves."""
    ids = {id(parameter) for parameter in parameters}
    found: dict[str, Optimizer] = {}
    if _is_closed(optimizer):
        return found
    for where, inner in _within(vars(optimizer), "", {id(optimizer)}):
        held = (p for group in inner.param_groups for p in group["params"])
        if ids.isdisjoint(map(id, held)):
            continue
        if not any(_same(inner, other) for other in (optimizer, *found.values())):
            found[where] = inner
    return found


def inner_prefix(prefix: str, where: str) -> str:
    """What the names of tensors of the inner optimizer at `where` begin with."""
    return f"{prefix}{_INNER}{where}/"


def is_inner(name: str, prefix: str) -> bool:
    """Whether a tensor belongs to an inner optimizer."""
    return name.startswith(prefix + _INNER)


def outer_name(name: str, prefix: str = "optimizer/") -> str:
    """The name that a tensor would have if its optimizer were inside of none."""
    if not is_inner(name, prefix):
        return name
    return prefix + name.removeprefix(prefix + _INNER).partition("/")[2]


def warn_of_left_out(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Warns once of state that a save leaves out: the shared one that cannot be saved, and what
    `state_dict()` of a class that has one of its own has besides groups and states."""
    parameters = list(parameters)
    every = [optimizer, *inner_optimizers(optimizer, parameters).values()]
    for each in every[1:]:
        pack_shared(each)
    pack_shared(optimizer)
    warn_of_more(optimizer, every, parameters)


def warn_of_more(
    optimizer: Optimizer, every: Iterable[Optimizer], parameters: Iterable[Tensor]
) -> None:
    """Warns once of what `state_dict()` of an optimizer and those inside has besides their groups
    and states, which alone are saved."""
    every = list(every)
    tensors, keys = {_mark(p) for p in parameters}, {"state", "param_groups", "params"}
    _collect([[each.state, each.param_groups] for each in every], tensors, keys, set())
    left: dict[str, str] = {}
    for each in every:
        if type(each).state_dict is Optimizer.state_dict:
            continue
        kind = type(each).__name__
        try:
            saved = each.state_dict()
        except Exception as error:  # whatever a class of the user's raises
            left[f"state_dict of {kind}"] = f"{kind}.state_dict() could not be read ({error})"
            continue
        for where in _unknown(saved, "", False, tensors, keys, set()):
            left[f"state_dict of {kind}{where}"] = (
                f"{kind}.state_dict(){where} is neither in its groups nor in its state or in that "
                f"of an optimizer in its attributes; keep it in state[parameter], in "
                "state['a text'] or as an option of a group"
            )
    warn_of(optimizer, left)


def tell_rates(
    where: str,
    inner: Optimizer,
    optimizer: Optimizer,
    groups: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> None:
    """Warns where a load gives another rate to `groups` (each with its saved options) that are the
    inner optimizer's alone: nobody else looks at them."""
    outer = {id(group) for group in optimizer.param_groups}
    for group, options in groups:
        given, saved = group.get("lr"), options.get("lr")
        if id(group) in outer or given is None or saved is None or float(given) == float(saved):
            continue
        if is_main():
            _log.warning(
                "the %s inside of the optimizer (%s) is given lr=%g and goes on with lr=%g, as it "
                "was saved", type(inner).__name__, where, float(given), float(saved),
            )  # fmt: skip


def _is_closed(optimizer: Optimizer) -> bool:
    """Whether its class refuses to show its state, as one that keeps a part on each rank does."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return False
    try:
        optimizer.state_dict()
    except Exception:  # whatever a class of the user's raises
        return True
    return False


def _same(inner: Optimizer, other: Optimizer) -> bool:
    """Whether `inner` keeps nothing that `other` does not: some wrappers take over both."""
    groups = {id(group) for group in other.param_groups}
    return inner.state is other.state and all(id(g) in groups for g in inner.param_groups)


def _within(value: Any, where: str, seen: set[int]) -> Iterator[tuple[str, Optimizer]]:
    """Optimizers in attributes, lists and dictionaries, with where they are."""
    if isinstance(value, Optimizer | Mapping | list | tuple):
        if id(value) in seen:
            return
        seen.add(id(value))
    if isinstance(value, Optimizer):
        yield where, value
        if not _is_closed(value):
            yield from _within(vars(value), where, seen)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str | int):
                yield from _within(item, _joined(where, key), seen)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _within(item, _joined(where, number), seen)


def _joined(where: str, key: str | int) -> str:
    name = quote(str(key), safe="")  # no slash, which ends it in the names of tensors
    return f"{where}.{name}" if where else name


def _collect(value: Any, tensors: set[int], keys: set[str], seen: set[int]) -> None:
    if isinstance(value, Tensor):
        tensors.add(_mark(value))
    elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, Mapping):
            keys.update(key for key in value if isinstance(key, str))
        for item in value.values() if isinstance(value, Mapping) else value:
            _collect(item, tensors, keys, seen)


def _unknown(
    value: Any, where: str, known: bool, tensors: set[int], keys: set[str], seen: set[int]
) -> Iterator[str]:
    """Where `value` has tensors that are no optimizer's, or values under no key of one."""
    if isinstance(value, Tensor):
        if value.numel() and _mark(value) not in tensors:
            yield where
    elif isinstance(value, Mapping | list | tuple):
        if id(value) in seen:
            return
        seen.add(id(value))
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            inside = key in keys or (known and not isinstance(key, str))
            yield from _unknown(item, f"{where}[{key!r}]", inside, tensors, keys, seen)
    elif value is not None and not isinstance(value, str) and not known:
        yield where


def _mark(tensor: Tensor) -> int:
    """What tells a tensor from others, and is the same for another view of all of it."""
    plain = tensor.layout is torch.strided and not hasattr(tensor, "placements")
    return (tensor.data_ptr() if plain else 0) or id(tensor)
